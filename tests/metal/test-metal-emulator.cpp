// SPDX-License-Identifier: MIT
//
// Tests of the stand-in for Metal itself: every collective and matrix operation against plain loops, conversions, what
// a lane sees of threadgroup memory and when, and that faults end the process with a message that names them.

#include "emulator.h"
#include "guarded-memory.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

using namespace emulator;

static int n_passed = 0;
static int n_failed = 0;

static void check(bool ok, const std::string & what) {
    ++(ok ? n_passed : n_failed);
    if (!ok) {
        fprintf(stderr, "FAILED: %s\n", what.c_str());
    }
}

//
// buffers and launches
//

struct test_args {
    int32_t n;
    int32_t other;
};

// device memory, filled with 0xff
template<typename T> struct buffer {
    guarded_memory memory;
    size_t         n;

    explicit buffer(size_t n) : memory(guarded_allocate(n*sizeof(T), alignof(T), "the end of a buffer")), n(n) {
        memset(memory.data, 0xff, n*sizeof(T));
    }
    buffer(const buffer &) = delete;
    ~buffer() { guarded_free(memory); }

    T &       operator[](size_t i)       { return ((T *) memory.data)[i]; }
    const T & operator[](size_t i) const { return ((const T *) memory.data)[i]; }
    void *    data()                     { return memory.data; }
};

static const std::vector<constant_value> no_constants;

static counters launch(const char * name, std::initializer_list<void *> buffers, std::initializer_list<uint32_t> threadgroups,
        std::initializer_list<uint32_t> threads, size_t memory = 0, const std::vector<constant_value> & constants = no_constants) {
    dispatch d = {};
    d.function  = find_kernel(name);
    d.constants = &constants;
    if (!d.function) {
        fail("no kernel %s", name);
    }
    check(d.function->n_buffers == (int) buffers.size(), std::string(name) + ": number of buffers");
    std::copy(buffers.begin(), buffers.end(), d.arguments.buffers);
    std::fill_n(d.threadgroups, 3, 1);
    std::fill_n(d.threads, 3, 1);
    std::copy(threadgroups.begin(), threadgroups.end(), d.threadgroups);
    std::copy(threads.begin(), threads.end(), d.threads);
    d.threadgroup_memory[0] = memory;
    return run(d);
}

//
// halves and bfloats by the definition: the nearest value, ties to even
//

static double small_float_value(uint32_t bits, int mantissa, int exponent) {
    const int    bias = (1 << (exponent - 1)) - 1;
    const int    e    = bits >> mantissa & ((1 << exponent) - 1);
    const double m    = bits & ((1u << mantissa) - 1);
    const double sign = bits >> (mantissa + exponent) & 1 ? -1.0 : 1.0;
    if (e == (1 << exponent) - 1) {
        return m ? NAN : sign*INFINITY;
    }
    return e ? sign*ldexp(m + (1 << mantissa), e - bias - mantissa) : sign*ldexp(m, 1 - bias - mantissa);
}

static uint32_t nearest_small_float(float x, int mantissa, int exponent) {
    const uint32_t sign    = signbit(x) ? 1u << (mantissa + exponent) : 0;
    const uint32_t largest = (((1u << exponent) - 1) << mantissa) - 1;
    const double   value   = fabs((double) x);
    // values grow with their bits: bisection
    uint32_t low = 0, up = largest + 1;
    while (low + 1 < up) {
        const uint32_t middle = (low + up)/2;
        (small_float_value(middle, mantissa, exponent) <= value ? low : up) = middle;
    }
    const double below = small_float_value(low, mantissa, exponent);
    // beyond the largest value, as if the next one were there
    const double above = low == largest ? 2*below - small_float_value(low - 1, mantissa, exponent) : small_float_value(up, mantissa, exponent);
    if (value - below > above - value || (value - below == above - value && low & 1)) {
        low = up;
    }
    return sign | low;
}

static float half_value(uint16_t bits) {
    return (float) small_float_value(bits, 10, 5);
}

static uint16_t to_half(float x) {
    return (uint16_t) nearest_small_float(x, 10, 5);
}

//
// tests
//

static void test_binding() {
    const uint32_t grid[3] = { 3, 2, 2 }, threads[3] = { 20, 3, 2 }; // 120 threads: the last simdgroup is not full
    const int n = 13;
    buffer<uint32_t> dst(n*12*120), constants(4);
    test_args args = { n, 77 };
    launch("test_positions", { &args, dst.data(), constants.data() }, { 3, 2, 2 }, { 20, 3, 2 }, 0,
            { { 9900, constant_kind::int32, -5 }, { 9901, constant_kind::boolean, 0 }, { 9902, constant_kind::int16, 300 } });
    bool ok = true;
    for (uint32_t g = 0; g < 12; ++g) {
        for (uint32_t t = 0; t < 120; ++t) {
            const uint32_t tg[3] = { g%grid[0], g/grid[0]%grid[1], g/grid[0]/grid[1] };
            const uint32_t th[3] = { t%threads[0], t/threads[0]%threads[1], t/threads[0]/threads[1] };
            const uint32_t expected[n] = { tg[0], tg[1], tg[2],
                tg[0]*threads[0] + th[0], tg[1]*threads[1] + th[1], tg[2]*threads[2] + th[2],
                th[0], th[1], th[2], t, t%32, t/32, 4 };
            for (int i = 0; i < n; ++i) {
                ok &= dst[(g*120 + t)*n + i] == expected[i];
            }
        }
    }
    check(ok, "positions of lanes");
    check(constants[0] == (uint32_t) -5 && constants[1] == 0 && constants[2] == 300 && constants[3] == 77, "function constants");
}

template<typename T> static void check_collectives(const char * name, const std::function<T(float)> & from, const std::function<float(T)> & to) {
    const int n = 32;
    buffer<T> src(n), dst(16*n);
    std::vector<float> v(n);
    for (int i = 0; i < n; ++i) {
        v[i] = (float) ((i*37 + 11)%29 - 9); // whole numbers: sums are exact in every type
        src[i] = from(v[i]);
    }
    test_args args = { 3, 9 };
    launch(name, { src.data(), dst.data(), &args }, { 1 }, { 32 });
    float sum = 0, product = 1;
    for (int i = 0; i < n; ++i) {
        sum += v[i];
        product *= i < 5 ? v[i] : 1;
    }
    float before = 0;
    bool ok[12];
    std::fill_n(ok, 12, true);
    for (int i = 0; i < n; ++i) {
        const float expected[12] = {
            sum, *std::max_element(v.begin(), v.end()), *std::min_element(v.begin(), v.end()), before + v[i], before,
            v[(i*5 + 3)%32], i + 3 < n ? v[i + 3] : v[i], i >= 3 ? v[i - 3] : v[i], v[i ^ 9], v[3], v[0], product };
        before += v[i];
        for (int k = 0; k < 12; ++k) {
            ok[k] &= to(dst[16*i + k]) == expected[k];
        }
    }
    for (int k = 0; k < 12; ++k) {
        check(ok[k], std::string(name) + ": result " + std::to_string(k));
    }
}

static void test_collectives() {
    check_collectives<float>("test_collectives_f32", [](float x) { return x; }, [](float x) { return x; });
    check_collectives<int32_t>("test_collectives_i32", [](float x) { return (int32_t) x; }, [](int32_t x) { return (float) x; });
    check_collectives<uint16_t>("test_collectives_f16", [](float x) { return to_half(x); }, [](uint16_t x) { return half_value(x); });

    buffer<uint32_t> src(32), dst(8*32);
    uint32_t all_and = ~0u, all_or = 0, all_xor = 0, ballot = 0;
    for (int i = 0; i < 32; ++i) {
        src[i] = (0x9e3779b9u*(i + 1)) | 0x00100000u;
        all_and &= src[i];
        all_or  |= src[i];
        all_xor ^= src[i];
        ballot  |= (src[i] & 1) << i;
    }
    launch("test_bits", { src.data(), dst.data() }, { 1 }, { 32 });
    bool ok = true;
    for (int i = 0; i < 32; ++i) {
        const uint32_t expected[8] = { all_and, all_or, all_xor, ballot, 0, 1,
            (uint32_t) __builtin_popcount(src[i]), (uint32_t) (__builtin_clz(src[i]) + 100*__builtin_ctz(src[i])) };
        for (int k = 0; k < 8; ++k) {
            ok &= dst[8*i + k] == expected[k];
        }
    }
    check(ok, "bits");
}

template<typename T> static void check_matrices(const char * name, const std::function<T(float)> & from, const std::function<float(T)> & to) {
    buffer<T> src(8*16), dst(256);
    float a[8][8], b[8][8];
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) {
            a[i][j] = (float) ((i*5 + j*3)%7 - 3); // sums of products stay below 2048: exact in half
            b[i][j] = (float) ((i*2 + j*9)%11 - 5);
            src[16*i + j]     = from(a[i][j]);
            src[16*i + 8 + j] = from(b[i][j]);
        }
    }
    launch(name, { src.data(), dst.data() }, { 1 }, { 32 }, 64*sizeof(T));
    bool ok[4] = { true, true, true, true };
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) {
            float ab = 0.5f, abt = 0.0f;
            for (int k = 0; k < 8; ++k) {
                ab  += a[i][k]*b[k][j];
                abt += a[i][k]*b[j][k];
            }
            ok[0] &= to(dst[8*i + j])       == ab;
            ok[1] &= to(dst[64 + 8*i + j])  == abt;
            ok[2] &= to(dst[128 + 8*j + i]) == a[i][j];
            ok[3] &= to(dst[192 + 8*i + j]) == abt;
        }
    }
    check(ok[0], std::string(name) + ": product and sum");
    check(ok[1], std::string(name) + ": product with a transposed load");
    check(ok[2], std::string(name) + ": transposed store");
    check(ok[3], std::string(name) + ": through threadgroup memory");
}

static void test_matrices() {
    check_matrices<float>("test_matrices_f32", [](float x) { return x; }, [](float x) { return x; });
    check_matrices<uint16_t>("test_matrices_f16", [](float x) { return to_half(x); }, [](uint16_t x) { return half_value(x); });
}

static void test_conversions() {
    std::vector<float> values = { 0.0f, -0.0f, 1.0f, -1.0f, 65504.0f, 65519.9f, 65520.0f, 1e30f, -1e30f, INFINITY, -INFINITY,
        5.9604645e-08f, 2.9802322e-08f, 2.98023259e-08f, 6.1035156e-05f, 6.0975552e-05f, 1e-45f, 3.3895314e38f, 3.4e38f, 0.1f };
    uint32_t state = 1;
    for (int i = 0; i < 4000; ++i) {
        state = state*1664525u + 1013904223u;
        const uint32_t bits = state;
        float x;
        memcpy(&x, &bits, 4);
        if (isfinite(x)) {
            values.push_back(x);
        }
        state = state*1664525u + 1013904223u;
        values.push_back(ldexpf((float) (int32_t) state, -40 + i%30)); // around the range of half
        values.push_back(half_value(state & 0x7bff) + ldexpf(1.0f, -24)); // ties among small halves
    }
    const int n = values.size();
    buffer<float> src(n);
    buffer<uint32_t> dst(4*n);
    std::copy(values.begin(), values.end(), &src[0]);
    test_args args = { n, 0 };
    launch("test_conversions", { src.data(), dst.data(), &args }, { (uint32_t) (n + 63)/64 }, { 64 });
    int wrong[4] = {};
    for (int i = 0; i < n; ++i) {
        const uint32_t h = nearest_small_float(values[i], 10, 5);
        const uint32_t b = nearest_small_float(values[i], 7, 8);
        float back[2];
        memcpy(back, &dst[4*i + 2], 8);
        wrong[0] += dst[4*i] != h;
        wrong[1] += dst[4*i + 1] != b;
        wrong[2] += back[0] != (float) small_float_value(h, 10, 5);
        wrong[3] += back[1] != (float) small_float_value(b, 7, 8);
    }
    const char * names[4] = { "float to half", "float to bfloat", "half to float", "bfloat to float" };
    for (int k = 0; k < 4; ++k) {
        check(wrong[k] == 0, std::string(names[k]) + ": " + std::to_string(wrong[k]) + " of " + std::to_string(n) + " wrong");
    }

    buffer<uint16_t> half(4);
    launch("test_half_rounding", { half.data() }, { 1 }, { 1 });
    check(half_value(half[0]) == 2048 && half_value(half[1]) == 2050 && half_value(half[2]) == 2050, "halves round at each operation");
    check(half[3] == to_half(half_value(to_half(0.1f))*3.0f), "product of halves");

    buffer<float> literal(2), one(1);
    one[0] = 1.0f;
    launch("test_literals", { literal.data(), one.data() }, { 1 }, { 1 });
    check(literal[0] == 0.0f && literal[1] == 4.0f, "literals are floats");
}

static void test_vectors() {
    buffer<float> src(8), dst(32);
    const float a[4] = { 0.25f, 1.5f, -2.0f, 3.0f }, b[4] = { 2.0f, 0.5f, 4.0f, 8.0f };
    std::copy_n(a, 4, &src[0]);
    std::copy_n(b, 4, &src[4]);
    launch("test_vectors", { src.data(), dst.data() }, { 1 }, { 1 });
    const int8_t * bytes = (const int8_t *) src.data();
    bool ok = true;
    float product = 0;
    for (int k = 0; k < 4; ++k) {
        const float sum = a[k] + 2.0f*b[k] - a[k]/b[k];
        product += a[k]*b[k];
        ok &= dst[k] == sum && dst[4 + k] == half_value(to_half(sum)) && dst[8 + k] == 4*(k + 1) + bytes[k];
        ok &= dst[12 + k] == std::max(a[k], b[k]) && dst[16 + k] == std::min(std::max(a[k], 0.0f), 1.0f);
        ok &= dst[20 + k] == (a[k] < b[k] ? b[k] : a[k]) && dst[24 + k] == bytes[k + 1];
    }
    check(ok, "vectors element by element");
    check(dst[28] == product && dst[29] == 4.5f && dst[30] == a[0] + 10*a[1] + 100*a[2] + 1000*a[3] && dst[31] == 1, "vectors as a whole");
}

static void test_threadgroup_memory() {
    for (schedule order : { schedule::ascending, schedule::descending, schedule::random }) {
        current_settings().order = order;
        const std::string with = ", order " + std::to_string((int) order);

        buffer<float> seen(4*32);
        launch("test_lockstep", { seen.data() }, { 1 }, { 32 }, 32*4);
        bool ok = true;
        for (int i = 0; i < 32; ++i) {
            ok &= seen[4*i] == i && seen[4*i + 1] == -1 && seen[4*i + 2] == -1 && seen[4*i + 3] == (i + 1)%32;
        }
        check(ok, "a lane sees its own writes at once, others' after a collective" + with);

        buffer<uint8_t> bytes(32);
        const counters c = launch("test_bytes", { bytes.data() }, { 1 }, { 32 }, 32);
        ok = c.write_conflicts == 0;
        for (int i = 0; i < 32; ++i) {
            ok &= bytes[i] == 32 - i;
        }
        check(ok, "neighbouring bytes" + with);

        buffer<uint32_t> poison(2*32*5);
        launch("test_poison", { poison.data() }, { 5 }, { 32 }, 32*4);
        ok = true;
        for (int i = 0; i < 2*32*5; ++i) {
            ok &= poison[i] == 0xffffffffu;
        }
        check(ok, "threadgroup memory is poisoned for each threadgroup" + with);

        buffer<uint32_t> own(64*7);
        launch("test_own_variables", { own.data() }, { 7 }, { 64 });
        ok = true;
        for (int i = 0; i < 64*7; ++i) {
            ok &= own[i] == (uint32_t) (63 - i%64)*8 + 64;
        }
        check(ok, "variables in threadgroup memory" + with);

        buffer<int32_t> total(1), sums(9);
        total[0] = 0;
        launch("test_atomics", { total.data(), sums.data() }, { 9 }, { 128 }, 16);
        ok = total[0] == 9*128*127/2;
        for (int i = 0; i < 9; ++i) {
            ok &= sums[i] == 128*127/2;
        }
        check(ok, "atomics" + with);

        const int n = 256;
        buffer<float> src(40*n), dst(40);
        for (int i = 0; i < 40*n; ++i) {
            src[i] = (float) (i%97);
        }
        launch("test_tree", { src.data(), dst.data() }, { 40 }, { n }, n*4);
        ok = true;
        for (int g = 0; g < 40; ++g) {
            float sum = 0;
            for (int i = 0; i < n; ++i) {
                sum += src[g*n + i];
            }
            ok &= dst[g] == sum; // whole numbers below 2^24: exact in any order
        }
        check(ok, "a tree of sums" + with);
    }
    current_settings().order = schedule::ascending;
}

static void test_zero_division() {
    buffer<int32_t> dst(4);
    test_args args = { 0, 0 };
    const counters c = launch("test_zero_division", { dst.data(), &args }, { 1 }, { 1 });
    check(dst[0] == 7 && dst[2] == 8, "a division by zero doesn't trap");
#if defined(__x86_64__)
    check(c.zero_divisions <= 2, "divisions by zero are counted"); // the compiler may drop them
#else
    (void) c;
#endif
}

//
// faults: each in a process of its own, which has to end with the message
//

static void do_fault(const std::string & name) {
    buffer<float> dst(64);
    test_args args = { 64, 0 };
    if (name == "test_overrun_buffer") {
        launch(name.c_str(), { dst.data(), &args }, { 1 }, { 1 });
    } else if (name == "test_overrun_threadgroup") {
        launch(name.c_str(), { dst.data(), &args }, { 1 }, { 1 }, 64*4);
    } else if (name == "test_no_threadgroup_memory") {
        launch("test_lockstep", { dst.data() }, { 1 }, { 32 }, 0);
    } else if (name == "test_too_much_threadgroup_memory") {
        launch("test_lockstep", { dst.data() }, { 1 }, { 32 }, 32768 + 16);
    } else {
        launch(name.c_str(), { dst.data() }, { 1 }, { 64 });
    }
}

static void expect_fault(const char * program, const char * name, int signal_number, std::initializer_list<const char *> messages) {
    int out[2];
    if (pipe(out) != 0) {
        fail("no pipe");
    }
    const pid_t child = fork();
    if (child == 0) {
        dup2(out[1], STDERR_FILENO);
        close(out[0]);
        close(out[1]);
        execl(program, program, "--fault", name, (char *) nullptr);
        _exit(127);
    }
    close(out[1]);
    std::string text;
    char part[4096];
    for (ssize_t n; (n = read(out[0], part, sizeof(part))) > 0; ) {
        text.append(part, n);
    }
    close(out[0]);
    int status = 0;
    waitpid(child, &status, 0);
    bool ok = WIFSIGNALED(status) && WTERMSIG(status) == signal_number;
    for (const char * message : messages) {
        ok &= text.find(message) != std::string::npos;
    }
    check(ok, std::string(name) + ": status " + std::to_string(status) + ", message: " + text);
}

// the line of a text in the source of the kernels, as faults name it
static std::string line_of(const char * source, const char * function, const char * text) {
    FILE * file = fopen(source, "r");
    if (!file) {
        fail("can't open %s", source);
    }
    char line[1024];
    bool inside = false;
    int  n      = 0;
    while (fgets(line, sizeof(line), file)) {
        ++n;
        inside |= strstr(line, function) != nullptr;
        if (inside && strstr(line, text)) {
            fclose(file);
            return "line " + std::to_string(n);
        }
    }
    fail("%s: no '%s' in %s", source, text, function);
}

static void test_faults(const char * program, const char * source) {
    auto at = [&](const char * function, const char * text) { return line_of(source, function, text); };

    expect_fault(program, "test_divergent_operation", SIGABRT, { "divergent collective", "in test_divergent_operation",
        ("simd_sum, " + at("test_divergent_operation", "simd_sum")).c_str(), ("simd_max, " + at("test_divergent_operation", "simd_max")).c_str() });
    expect_fault(program, "test_divergent_return", SIGABRT, { "divergent collective", "lane 7 at return",
        ("simd_sum, " + at("test_divergent_return", "simd_sum")).c_str() });
    expect_fault(program, "test_divergent_barrier", SIGABRT, { "divergent threadgroup barrier", "at return",
        ("threadgroup_barrier, " + at("test_divergent_barrier", "threadgroup_barrier")).c_str() });
    expect_fault(program, "test_divergent_matrix", SIGABRT, { "divergent collective", "simdgroup_barrier",
        ("simdgroup_multiply_accumulate, " + at("test_divergent_matrix", "simdgroup_multiply_accumulate")).c_str() });
    expect_fault(program, "test_lane_pointer", SIGABRT, { "other arguments", at("test_lane_pointer", "simdgroup_load").c_str() });
    expect_fault(program, "test_overrun_buffer", SIGSEGV, { "access past the end of a buffer", "in test_overrun_buffer" });
    expect_fault(program, "test_overrun_threadgroup", SIGSEGV, { "access past the end of threadgroup memory", "in test_overrun_threadgroup" });
    expect_fault(program, "test_no_threadgroup_memory", SIGABRT, { "the host set no size for threadgroup memory 0" });
    expect_fault(program, "test_too_much_threadgroup_memory", SIGABRT, { "32784 bytes of threadgroup memory, the device has 32768" });
}

int main(int argc, char ** argv) {
    if (argc == 3 && strcmp(argv[1], "--fault") == 0) {
        do_fault(argv[2]);
        return 0;
    }

    test_binding();
    test_collectives();
    test_matrices();
    test_conversions();
    test_vectors();
    test_threadgroup_memory();
    test_zero_division();
    test_faults(argv[0], TEST_KERNELS);

    printf("%d checks passed, %d failed\n", n_passed, n_failed);
    return n_failed ? 1 : 0;
}
