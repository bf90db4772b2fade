// SPDX-License-Identifier: MIT
//
// 8x8 matrices of a simdgroup. On a GPU each lane holds two elements; here each lane has a copy of the whole matrix, in
// float with the values that its type can hold. As loads and products are the same for all lanes, the first lane
// computes them and the others take the result: no meeting is needed. Stores write each lane's two elements.

#pragma once

namespace metal {

template<typename T, int C, int R> struct simdgroup_matrix {
    static_assert(C == 8 && R == 8, "simdgroup matrices are 8x8");
    float values[64]; // row by row

    simdgroup_matrix() = default;
    explicit simdgroup_matrix(T diagonal) {
        for (int i = 0; i < 64; ++i) {
            values[i] = i%9 == 0 ? (float) diagonal : 0.0f;
        }
    }
};

typedef simdgroup_matrix<half,   8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float,  8, 8> simdgroup_float8x8;

} // namespace metal

namespace msl {

// the type of a matrix says what is pointed to, so that all that converts to a pointer can be given
template<typename T> struct same_type { typedef T type; };
template<typename T> using same = typename same_type<T>::type;

// the elements of a lane: (row, column) and (row, column + 1), where Apple's GPUs have them
inline int matrix_row(int lane)    { const int quad = lane/4; return (quad & 4) + lane/2%4; }
inline int matrix_column(int lane) { const int quad = lane/4; return (quad & 2)*2 + lane%2*2; }

// origin of a load or store: (column, row) in elements
struct matrix_origin {
    ulong x;
    ulong y;
    matrix_origin(int both = 0)    : x(both), y(both) {}
    matrix_origin(metal::ulong2 o) : x(o.x),  y(o.y)  {}
};

typedef float float8 __attribute__((ext_vector_type(8), aligned(4)));

template<typename T> inline void load_matrix(float * values, const T * p, ulong stride, bool transposed) {
    for (int row = 0; row < 8; ++row) {
        for (int column = 0; column < 8; ++column) {
            values[transposed ? 8*column + row : 8*row + column] = (float) p[row*stride + column];
        }
    }
}

template<typename T> inline void multiply_matrices(float * d, const float * a, const float * b, const float * c) {
    for (int row = 0; row < 8; ++row) {
        float8 sum;
        __builtin_memcpy(&sum, c + 8*row, sizeof(sum));
        for (int k = 0; k < 8; ++k) {
            float8 other;
            __builtin_memcpy(&other, b + 8*k, sizeof(other));
            sum = __builtin_elementwise_fma((float8) a[8*row + k], other, sum);
        }
        for (int column = 0; column < 8; ++column) {
            d[8*row + column] = (float) (T) sum[column];
        }
    }
}

} // namespace msl

namespace metal {

template<typename T, int C, int R = C> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T value) {
    simdgroup_matrix<T, C, R> m;
    for (float & v : m.values) {
        v = (float) value;
    }
    return m;
}

template<typename T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8> & m, const msl::same<T> * p, ulong stride = 8,
        msl::matrix_origin origin = 0, bool transposed = false, MSL_LINE) {
    p += transposed ? origin.x*stride + origin.y : origin.y*stride + origin.x;
    bool first;
    emulator::uniform_step & step = emulator::next_step(operation::matrix_load, line, p, stride, transposed, first);
    if (first) {
        msl::load_matrix(step.values, p, stride, transposed);
    }
    __builtin_memcpy(m.values, step.values, sizeof(m.values));
}

template<typename T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8> & m, msl::same<T> * p, ulong stride = 8,
        msl::matrix_origin origin = 0, bool transposed = false, MSL_LINE) {
    p += transposed ? origin.x*stride + origin.y : origin.y*stride + origin.x;
    bool first;
    emulator::next_step(operation::matrix_store, line, p, stride, transposed, first);
    const int row    = msl::matrix_row(emulator::current.lane);
    const int column = msl::matrix_column(emulator::current.lane);
    for (int i = column; i < column + 2; ++i) {
        p[transposed ? i*stride + row : row*stride + i] = (T) m.values[8*row + i];
    }
}

// sums are kept in float and rounded to the type of the result once for each product of matrices
template<typename D, typename A, typename B, typename C> inline void simdgroup_multiply_accumulate(
        simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b,
        const simdgroup_matrix<C, 8, 8> & c, MSL_LINE) {
    bool first;
    emulator::uniform_step & step = emulator::next_step(operation::matrix_multiply, line, nullptr, 0, false, first);
    if (first) {
        msl::multiply_matrices<D>(step.values, a.values, b.values, c.values);
    }
    __builtin_memcpy(d.values, step.values, sizeof(d.values));
}

template<typename D, typename A, typename B> inline void simdgroup_multiply(
        simdgroup_matrix<D, 8, 8> & d, const simdgroup_matrix<A, 8, 8> & a, const simdgroup_matrix<B, 8, 8> & b, MSL_LINE) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8>(0.0f), line);
}

} // namespace metal
