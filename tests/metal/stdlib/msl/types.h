// SPDX-License-Identifier: MIT
//
// Scalars, vectors and matrices.

#pragma once

typedef _Float16       half;
typedef __bf16         bfloat;
typedef unsigned char  uchar;
typedef unsigned short ushort;
typedef unsigned int   uint;
typedef unsigned long  ulong;

constexpr half operator""h(long double x)        { return (half) x; }
constexpr half operator""h(unsigned long long x) { return (half) x; }

namespace metal {

template<typename A, typename B> struct is_same       { static constexpr bool value = false; };
template<typename A>             struct is_same<A, A> { static constexpr bool value = true;  };
template<typename A, typename B> constexpr bool is_same_v = is_same<A, B>::value;

template<bool C, typename T = void> struct enable_if {};
template<typename T>                struct enable_if<true, T> { typedef T type; };
template<bool C, typename T = void> using enable_if_t = typename enable_if<C, T>::type;

template<bool C, typename A, typename B> struct conditional              { typedef A type; };
template<typename A, typename B>         struct conditional<false, A, B> { typedef B type; };
template<bool C, typename A, typename B> using conditional_t = typename conditional<C, A, B>::type;

template<typename T> struct remove_reference      { typedef T type; };
template<typename T> struct remove_reference<T &> { typedef T type; };
template<typename T> struct remove_const          { typedef T type; };
template<typename T> struct remove_const<const T> { typedef T type; };
template<typename T> using remove_cv_ref = typename remove_const<typename remove_reference<T>::type>::type;

// clang has no conversion between half and bfloat, and none from bfloat to integers
template<typename T, typename U> constexpr T convert(U x) {
    if constexpr (is_same_v<T, U>) {
        return x;
    } else if constexpr (is_same_v<T, bfloat> || is_same_v<U, bfloat>) {
        return (T) (float) x;
    } else {
        return (T) x;
    }
}

//
// vectors
//

template<typename T, int N> struct vec_storage { T e[N]; };

template<typename T> struct vec_storage<T, 2> { union { T e[2]; struct { T x, y; };       struct { T r, g; };       }; };
template<typename T> struct vec_storage<T, 3> { union { T e[4]; struct { T x, y, z; };    struct { T r, g, b; };    }; };
template<typename T> struct vec_storage<T, 4> { union { T e[4]; struct { T x, y, z, w; }; struct { T r, g, b, a; }; }; };

// A vector of three takes the room of four. Metal wants vectors aligned like their size; GPUs take them at any of their
// elements, and some of upstream's kernels use that (rows of views in norm.metal), so only a strict build insists.
template<typename T, int N> constexpr int vec_alignment() {
#ifdef MSL_STRICT_ALIGNMENT
    return sizeof(T)*(N == 3 ? 4 : N);
#else
    return alignof(T);
#endif
}

template<typename T, int N> struct packed_vec;

template<typename T, int N> struct alignas(vec_alignment<T, N>()) vec : vec_storage<T, N> {
    using vec_storage<T, N>::e;
    typedef T element;

    vec() = default; // it is a member of unions

    vec(T s) { for (int i = 0; i < N; ++i) { e[i] = s; } } // implicit, as in Metal

    template<typename A, typename B> vec(A a, B b) {
        static_assert(N == 2, "a vector takes as many values as it has");
        e[0] = convert<T>(a); e[1] = convert<T>(b);
    }
    template<typename A, typename B, typename C> vec(A a, B b, C c) {
        static_assert(N == 3, "a vector takes as many values as it has");
        e[0] = convert<T>(a); e[1] = convert<T>(b); e[2] = convert<T>(c);
    }
    template<typename A, typename B, typename C, typename D> vec(A a, B b, C c, D d) {
        static_assert(N == 4, "a vector takes as many values as it has");
        e[0] = convert<T>(a); e[1] = convert<T>(b); e[2] = convert<T>(c); e[3] = convert<T>(d);
    }

    // from other element types only when it is written out
    template<typename U> explicit vec(const vec<U, N> & o)        { for (int i = 0; i < N; ++i) { e[i] = convert<T>(o.e[i]); } }
    template<typename U> explicit vec(const packed_vec<U, N> & o) { for (int i = 0; i < N; ++i) { e[i] = convert<T>(o.e[i]); } }

    T &       operator[](int i)       { return e[i]; }
    const T & operator[](int i) const { return e[i]; }

#define MSL_VECTOR_OPERATOR(op) \
    friend vec operator op(vec a, vec b) { \
        vec r; \
        for (int i = 0; i < N; ++i) { r.e[i] = (T) (a.e[i] op b.e[i]); } \
        return r; \
    } \
    friend vec & operator op##=(vec & a, vec b) { \
        for (int i = 0; i < N; ++i) { a.e[i] = (T) (a.e[i] op b.e[i]); } \
        return a; \
    }
    MSL_VECTOR_OPERATOR(+)
    MSL_VECTOR_OPERATOR(-)
    MSL_VECTOR_OPERATOR(*)
    MSL_VECTOR_OPERATOR(/)
    MSL_VECTOR_OPERATOR(%)
    MSL_VECTOR_OPERATOR(&)
    MSL_VECTOR_OPERATOR(|)
    MSL_VECTOR_OPERATOR(^)
    MSL_VECTOR_OPERATOR(<<)
    MSL_VECTOR_OPERATOR(>>)
#undef MSL_VECTOR_OPERATOR

#define MSL_VECTOR_COMPARISON(op) \
    friend vec<bool, N> operator op(vec a, vec b) { \
        vec<bool, N> r; \
        for (int i = 0; i < N; ++i) { r.e[i] = a.e[i] op b.e[i]; } \
        return r; \
    }
    MSL_VECTOR_COMPARISON(==)
    MSL_VECTOR_COMPARISON(!=)
    MSL_VECTOR_COMPARISON(<)
    MSL_VECTOR_COMPARISON(>)
    MSL_VECTOR_COMPARISON(<=)
    MSL_VECTOR_COMPARISON(>=)
    MSL_VECTOR_COMPARISON(&&)
    MSL_VECTOR_COMPARISON(||)
#undef MSL_VECTOR_COMPARISON

    friend vec operator+(vec a) { return a; }
    friend vec operator-(vec a) { for (int i = 0; i < N; ++i) { a.e[i] = (T) -a.e[i]; } return a; }
    friend vec operator~(vec a) { for (int i = 0; i < N; ++i) { a.e[i] = (T) ~a.e[i]; } return a; }
};

// aligned like its element
template<typename T, int N> struct packed_vec {
    T e[N];

    packed_vec() = default;
    packed_vec(const vec<T, N> & o) { for (int i = 0; i < N; ++i) { e[i] = o.e[i]; } }

    T &       operator[](int i)       { return e[i]; }
    const T & operator[](int i) const { return e[i]; }

    operator vec<T, N>() const { vec<T, N> r; for (int i = 0; i < N; ++i) { r.e[i] = e[i]; } return r; }
};

#define MSL_VECTORS(T) \
    typedef vec<T, 2> T##2; typedef vec<T, 3> T##3; typedef vec<T, 4> T##4; \
    typedef packed_vec<T, 2> packed_##T##2; typedef packed_vec<T, 3> packed_##T##3; typedef packed_vec<T, 4> packed_##T##4;
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(float)
#undef MSL_VECTORS

//
// matrices: columns of vectors
//

template<typename T, int C, int R> struct matrix {
    vec<T, R> columns[C];

    matrix() = default;
    explicit matrix(T diagonal) {
        for (int i = 0; i < C; ++i) {
            for (int j = 0; j < R; ++j) {
                columns[i].e[j] = i == j ? diagonal : (T) 0;
            }
        }
    }
    matrix(vec<T, R> a, vec<T, R> b) {
        static_assert(C == 2, "a matrix takes as many columns as it has");
        columns[0] = a; columns[1] = b;
    }
    matrix(vec<T, R> a, vec<T, R> b, vec<T, R> c, vec<T, R> d) {
        static_assert(C == 4, "a matrix takes as many columns as it has");
        columns[0] = a; columns[1] = b; columns[2] = c; columns[3] = d;
    }
    template<typename U> explicit matrix(const matrix<U, C, R> & o) {
        for (int i = 0; i < C; ++i) {
            columns[i] = vec<T, R>(o.columns[i]);
        }
    }

    vec<T, R> &       operator[](int i)       { return columns[i]; }
    const vec<T, R> & operator[](int i) const { return columns[i]; }

    friend matrix operator+(matrix a, const matrix & b) { for (int i = 0; i < C; ++i) { a.columns[i] += b.columns[i]; } return a; }
    friend matrix operator-(matrix a, const matrix & b) { for (int i = 0; i < C; ++i) { a.columns[i] -= b.columns[i]; } return a; }
    friend matrix operator*(matrix a, T s)              { for (int i = 0; i < C; ++i) { a.columns[i] *= s; } return a; }
    friend matrix operator*(T s, matrix a)              { return a*s; }
    friend vec<T, R> operator*(const matrix & a, vec<T, C> v) {
        vec<T, R> r = a.columns[0]*vec<T, R>(v.e[0]);
        for (int i = 1; i < C; ++i) {
            r += a.columns[i]*vec<T, R>(v.e[i]);
        }
        return r;
    }
};

#define MSL_MATRICES(T) \
    typedef matrix<T, 2, 2> T##2x2; typedef matrix<T, 2, 3> T##2x3; typedef matrix<T, 2, 4> T##2x4; \
    typedef matrix<T, 3, 2> T##3x2; typedef matrix<T, 3, 3> T##3x3; typedef matrix<T, 3, 4> T##3x4; \
    typedef matrix<T, 4, 2> T##4x2; typedef matrix<T, 4, 3> T##4x3; typedef matrix<T, 4, 4> T##4x4;
MSL_MATRICES(half)
MSL_MATRICES(float)
#undef MSL_MATRICES

template<typename To, typename From> inline To as_type(From from) {
    static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(to));
    return to;
}

} // namespace metal
