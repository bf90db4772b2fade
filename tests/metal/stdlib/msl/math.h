// SPDX-License-Identifier: MIT
//
// Arithmetic of scalars and vectors. Functions of all types are overloaded for each, without templates, so that a call
// with mixed types is as ambiguous as it is in Metal; functions of floating point take integers as float.

#pragma once

#undef INFINITY
#undef NAN
#define INFINITY    __builtin_inff()
#define NAN         __builtin_nanf("")
#define HUGE_VALF   __builtin_inff()
#define MAXHALF     ((half) 65504.0f)
#define HALF_MAX    ((half) 65504.0f)
#define HALF_MIN    ((half) 6.103515625e-05f)
#define MAXFLOAT    FLT_MAX
#define M_PI_F      3.14159265358979323846f
#define M_PI_2_F    1.57079632679489661923f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_SQRT2_F   1.41421356237309504880f
#define M_LN2_F     0.69314718055994530942f
#define M_LOG2E_F   1.44269504088896340736f
#define M_E_F       2.71828182845904523536f

namespace metal {

// what two different scalars become, in functions of floating point
template<typename T> struct is_scalar { static constexpr bool value = false; };
template<> struct is_scalar<int>    { static constexpr bool value = true; };
template<> struct is_scalar<uint>   { static constexpr bool value = true; };
template<> struct is_scalar<short>  { static constexpr bool value = true; };
template<> struct is_scalar<ushort> { static constexpr bool value = true; };
template<> struct is_scalar<half>   { static constexpr bool value = true; };
template<> struct is_scalar<float>  { static constexpr bool value = true; };

template<typename T, typename R> using if_scalar = enable_if_t<is_scalar<T>::value, R>;

template<typename A, typename B> using mixed = enable_if_t<
    is_scalar<A>::value && is_scalar<B>::value && !is_same_v<A, B>,
    conditional_t<(is_same_v<A, half> || is_same_v<B, half>) && !is_same_v<A, float> && !is_same_v<B, float>, half, float>>;

//
// functions of floating point, in half computed as float and rounded once
//

#define MSL_FLOAT_FUNCTION_1(name, expression) \
    inline float  name(float x)      { return expression; } \
    inline float  name(int value)    { const float x = (float) value; return expression; } \
    inline half   name(half value)   { const float x = (float) value; return (half)   (expression); } \
    inline bfloat name(bfloat value) { const float x = (float) value; return (bfloat) (expression); } \
    template<typename T, int N> inline vec<T, N> name(vec<T, N> v) { \
        for (int i = 0; i < N; ++i) { v.e[i] = name(v.e[i]); } \
        return v; \
    }

#define MSL_FLOAT_FUNCTION_2(name, expression) \
    inline float name(float x, float y)       { return expression; } \
    template<typename A, typename B> inline mixed<A, B> name(A a, B b) { return name((mixed<A, B>) a, (mixed<A, B>) b); } \
    inline half  name(half value, half other) { const float x = (float) value, y = (float) other; return (half) (expression); } \
    template<typename T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
        for (int i = 0; i < N; ++i) { a.e[i] = name(a.e[i], b.e[i]); } \
        return a; \
    } \
    template<typename T, int N, typename S> inline if_scalar<S, vec<T, N>> name(vec<T, N> a, S b) { return name(a, vec<T, N>((T) b)); } \
    template<typename T, int N, typename S> inline if_scalar<S, vec<T, N>> name(S a, vec<T, N> b) { return name(vec<T, N>((T) a), b); }

#define MSL_FLOAT_FUNCTIONS \
    MSL_FLOAT_FUNCTION_1(acos,  __builtin_acosf(x)) \
    MSL_FLOAT_FUNCTION_1(acosh, __builtin_acoshf(x)) \
    MSL_FLOAT_FUNCTION_1(asin,  __builtin_asinf(x)) \
    MSL_FLOAT_FUNCTION_1(asinh, __builtin_asinhf(x)) \
    MSL_FLOAT_FUNCTION_1(atan,  __builtin_atanf(x)) \
    MSL_FLOAT_FUNCTION_1(atanh, __builtin_atanhf(x)) \
    MSL_FLOAT_FUNCTION_1(ceil,  __builtin_ceilf(x)) \
    MSL_FLOAT_FUNCTION_1(cos,   __builtin_cosf(x)) \
    MSL_FLOAT_FUNCTION_1(cosh,  __builtin_coshf(x)) \
    MSL_FLOAT_FUNCTION_1(exp,   __builtin_expf(x)) \
    MSL_FLOAT_FUNCTION_1(exp2,  __builtin_exp2f(x)) \
    MSL_FLOAT_FUNCTION_1(exp10, __builtin_powf(10.0f, x)) \
    MSL_FLOAT_FUNCTION_1(fabs,  __builtin_fabsf(x)) \
    MSL_FLOAT_FUNCTION_1(floor, __builtin_floorf(x)) \
    MSL_FLOAT_FUNCTION_1(fract, x - __builtin_floorf(x)) \
    MSL_FLOAT_FUNCTION_1(log,   __builtin_logf(x)) \
    MSL_FLOAT_FUNCTION_1(log2,  __builtin_log2f(x)) \
    MSL_FLOAT_FUNCTION_1(log10, __builtin_log10f(x)) \
    MSL_FLOAT_FUNCTION_1(rint,  __builtin_rintf(x)) \
    MSL_FLOAT_FUNCTION_1(round, __builtin_roundf(x)) \
    MSL_FLOAT_FUNCTION_1(rsqrt, 1.0f/__builtin_sqrtf(x)) \
    MSL_FLOAT_FUNCTION_1(sin,   __builtin_sinf(x)) \
    MSL_FLOAT_FUNCTION_1(sinh,  __builtin_sinhf(x)) \
    MSL_FLOAT_FUNCTION_1(sqrt,  __builtin_sqrtf(x)) \
    MSL_FLOAT_FUNCTION_1(tan,   __builtin_tanf(x)) \
    MSL_FLOAT_FUNCTION_1(tanh,  __builtin_tanhf(x)) \
    MSL_FLOAT_FUNCTION_1(trunc, __builtin_truncf(x)) \
    MSL_FLOAT_FUNCTION_2(atan2,    __builtin_atan2f(x, y)) \
    MSL_FLOAT_FUNCTION_2(copysign, __builtin_copysignf(x, y)) \
    MSL_FLOAT_FUNCTION_2(divide,   x/y) \
    MSL_FLOAT_FUNCTION_2(fmax,     __builtin_fmaxf(x, y)) \
    MSL_FLOAT_FUNCTION_2(fmin,     __builtin_fminf(x, y)) \
    MSL_FLOAT_FUNCTION_2(fmod,     __builtin_fmodf(x, y)) \
    MSL_FLOAT_FUNCTION_2(pow,      __builtin_powf(x, y)) \
    MSL_FLOAT_FUNCTION_2(powr,     __builtin_powf(x, y))

MSL_FLOAT_FUNCTIONS

MSL_FLOAT_FUNCTION_1(sign, x > 0 ? 1.0f : x < 0 ? -1.0f : x)
MSL_FLOAT_FUNCTION_1(saturate, x > 0 ? x < 1 ? x : 1.0f : 0.0f)

// the CPU's are precise, which is a good stand-in for both of Metal's
namespace precise { MSL_FLOAT_FUNCTIONS }
namespace fast    { MSL_FLOAT_FUNCTIONS }

#undef MSL_FLOAT_FUNCTIONS
#undef MSL_FLOAT_FUNCTION_1
#undef MSL_FLOAT_FUNCTION_2

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// the product of two halves is exact in double, and so is the sum but for the widest spreads of exponents
inline half  fma(half a, half b, half c)    { return (half) __builtin_fma((double) a, (double) b, (double) c); }
template<typename T, int N> inline vec<T, N> fma(vec<T, N> a, vec<T, N> b, vec<T, N> c) {
    for (int i = 0; i < N; ++i) {
        a.e[i] = fma(a.e[i], b.e[i], c.e[i]);
    }
    return a;
}

inline float ldexp(float x, int e)   { return __builtin_ldexpf(x, e); }
inline float frexp(float x, int & e) { return __builtin_frexpf(x, &e); }
inline int   ilogb(float x)          { return __builtin_ilogbf(x); }

#define MSL_PREDICATE(name, expression) \
    inline bool name(float x)    { return expression; } \
    inline bool name(half value) { const float x = (float) value; return expression; } \
    template<typename T, int N> inline vec<bool, N> name(vec<T, N> v) { \
        vec<bool, N> r; \
        for (int i = 0; i < N; ++i) { r.e[i] = name(v.e[i]); } \
        return r; \
    }
MSL_PREDICATE(isfinite, __builtin_isfinite(x))
MSL_PREDICATE(isinf,    __builtin_isinf(x))
MSL_PREDICATE(isnan,    __builtin_isnan(x))
MSL_PREDICATE(signbit,  __builtin_signbit(x))
#undef MSL_PREDICATE

inline float mix(float a, float b, float t) { return a + (b - a)*t; }
inline float step(float edge, float x)      { return x < edge ? 0.0f : 1.0f; }

//
// functions of all types
//

#define MSL_ORDERED(T) \
    inline T max(T a, T b)            { return a < b ? b : a; } \
    inline T min(T a, T b)            { return b < a ? b : a; } \
    inline T max3(T a, T b, T c)      { return max(max(a, b), c); } \
    inline T min3(T a, T b, T c)      { return min(min(a, b), c); } \
    inline T clamp(T x, T low, T up)  { return min(max(x, low), up); } \
    inline T select(T a, T b, bool c) { return c ? b : a; }
MSL_ORDERED(char)
MSL_ORDERED(int8_t)
MSL_ORDERED(uchar)
MSL_ORDERED(short)
MSL_ORDERED(ushort)
MSL_ORDERED(int)
MSL_ORDERED(uint)
MSL_ORDERED(long)
MSL_ORDERED(ulong)
MSL_ORDERED(bfloat)
#undef MSL_ORDERED

// of a number and NaN the number, as Metal's
#define MSL_ORDERED_FLOAT(T) \
    inline T max(T a, T b)            { return a != a ? b : b != b ? a : a < b ? b : a; } \
    inline T min(T a, T b)            { return a != a ? b : b != b ? a : b < a ? b : a; } \
    inline T max3(T a, T b, T c)      { return max(max(a, b), c); } \
    inline T min3(T a, T b, T c)      { return min(min(a, b), c); } \
    inline T clamp(T x, T low, T up)  { return min(max(x, low), up); } \
    inline T select(T a, T b, bool c) { return c ? b : a; }
MSL_ORDERED_FLOAT(half)
MSL_ORDERED_FLOAT(float)
#undef MSL_ORDERED_FLOAT

#define MSL_INTEGER(T, U) \
    inline T abs(T x)      { return x < 0 ? (T) -x : x; } \
    inline T popcount(T x) { return (T) __builtin_popcountll((U) x); } \
    inline U popcount(U x) { return (U) __builtin_popcountll(x); } \
    inline T clz(T x)      { return x == 0 ? (T) (8*sizeof(T)) : (T) (__builtin_clzll((U) x) - (64 - 8*(int) sizeof(T))); } \
    inline U clz(U x)      { return x == 0 ? (U) (8*sizeof(U)) : (U) (__builtin_clzll(x)     - (64 - 8*(int) sizeof(U))); } \
    inline T ctz(T x)      { return x == 0 ? (T) (8*sizeof(T)) : (T) __builtin_ctzll((U) x); } \
    inline U ctz(U x)      { return x == 0 ? (U) (8*sizeof(U)) : (U) __builtin_ctzll(x); }
MSL_INTEGER(int8_t, uchar)
MSL_INTEGER(short,  ushort)
MSL_INTEGER(int,    uint)
MSL_INTEGER(long,   ulong)
#undef MSL_INTEGER

inline float abs(float x) { return __builtin_fabsf(x); }
inline half  abs(half x)  { return x < 0 ? (half) -x : x; }

inline uint extract_bits(uint x, uint offset, uint bits) { return bits == 0 ? 0 : x >> offset & (bits >= 32 ? ~0u : (1u << bits) - 1); }
inline uint mulhi(uint a, uint b)                        { return (uint) ((uint64_t) a*b >> 32); }
inline uint rotate(uint x, uint n)                       { n &= 31; return n == 0 ? x : x << n | x >> (32 - n); }

#define MSL_VECTOR_2(name) \
    template<typename T, int N> inline vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
        for (int i = 0; i < N; ++i) { a.e[i] = name(a.e[i], b.e[i]); } \
        return a; \
    }
MSL_VECTOR_2(max)
MSL_VECTOR_2(min)
#undef MSL_VECTOR_2

template<typename T, int N> inline vec<T, N> max(vec<T, N> a, T b) { return max(a, vec<T, N>(b)); }
template<typename T, int N> inline vec<T, N> min(vec<T, N> a, T b) { return min(a, vec<T, N>(b)); }

template<typename T, int N> inline vec<T, N> abs(vec<T, N> a) {
    for (int i = 0; i < N; ++i) {
        a.e[i] = abs(a.e[i]);
    }
    return a;
}

template<typename T, int N> inline vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> up) { return min(max(x, low), up); }
template<typename T, int N> inline vec<T, N> clamp(vec<T, N> x, T low, T up)                 { return min(max(x, low), up); }

template<typename T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    for (int i = 0; i < N; ++i) {
        a.e[i] = c.e[i] ? b.e[i] : a.e[i];
    }
    return a;
}

template<typename T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
    T sum = a.e[0]*b.e[0];
    for (int i = 1; i < N; ++i) {
        sum += a.e[i]*b.e[i];
    }
    return sum;
}

template<typename T, int N> inline T length(vec<T, N> a)         { return sqrt(dot(a, a)); }
template<typename T, int N> inline T length_squared(vec<T, N> a) { return dot(a, a); }

template<int N> inline bool any(vec<bool, N> v) { bool r = false; for (int i = 0; i < N; ++i) { r |= v.e[i]; } return r; }
template<int N> inline bool all(vec<bool, N> v) { bool r = true;  for (int i = 0; i < N; ++i) { r &= v.e[i]; } return r; }
inline bool any(bool v) { return v; }
inline bool all(bool v) { return v; }

} // namespace metal
