// SPDX-License-Identifier: MIT
//
// Metal's side of ggml-metal-device.h, over the emulator: buffers, libraries, pipelines, encoders, events, the device.
// Everything is done at once, on the calling thread's time.

#include "ggml-metal-device.h"

#include "emulator.h"
#include "guarded-memory.h"
#include "not-run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

using emulator::fail;

struct ggml_metal_device {
    ggml_metal_library_t           library;
    struct ggml_metal_device_props props;
    struct ggml_metal_fusion_info * finfo;
    char *                         next_virtual_address; // of buffers that the host can't see
    std::mutex                     mutex;
};

// supports_op and the list of libraries, as they stand in ggml-metal-device.m
#include "metal-device.inc"

//
// statistics: dispatches of each pipeline
//

namespace {

struct pipeline_statistics {
    uint64_t dispatches;
    emulator::counters counts;
};

struct statistics {
    std::mutex mutex;
    std::map<std::string, pipeline_statistics> pipelines;

    void add(const std::string & name, const emulator::counters & c) {
        std::lock_guard<std::mutex> lock(mutex);
        pipeline_statistics & p = pipelines[name];
        ++p.dispatches;
        p.counts.threadgroups    += c.threadgroups;
        p.counts.collectives     += c.collectives;
        p.counts.write_conflicts += c.write_conflicts;
        p.counts.overruns        += c.overruns;
        p.counts.zero_divisions  += c.zero_divisions;
    }

    // GGML_METAL_EMULATED_STATS: a path or a name that ends in .json is a file to write, anything else means stderr
    ~statistics() {
        const char * where = getenv("GGML_METAL_EMULATED_STATS");
        if (!where || !*where) {
            return;
        }
        const size_t length = strlen(where);
        const bool json = strchr(where, '/') || (length > 5 && strcmp(where + length - 5, ".json") == 0);
        FILE * out = json ? fopen(where, "w") : stderr;
        if (!out) {
            fprintf(stderr, "emulated Metal device: can't write %s\n", where);
            return;
        }
        if (json) {
            fprintf(out, "{");
        }
        const char * separator = "";
        for (const auto & item : pipelines) {
            const pipeline_statistics & p = item.second;
            if (json) {
                fprintf(out, "%s\n  \"%s\": {\"dispatches\": %llu, \"threadgroups\": %llu, \"collectives\": %llu, "
                        "\"write_conflicts\": %llu, \"overruns\": %llu, \"zero_divisions\": %llu}", separator, item.first.c_str(),
                        (unsigned long long) p.dispatches, (unsigned long long) p.counts.threadgroups,
                        (unsigned long long) p.counts.collectives, (unsigned long long) p.counts.write_conflicts,
                        (unsigned long long) p.counts.overruns, (unsigned long long) p.counts.zero_divisions);
                separator = ",";
            } else {
                fprintf(out, "emulated Metal device: %s %llu\n", item.first.c_str(), (unsigned long long) p.dispatches);
            }
        }
        if (json) {
            fprintf(out, "\n}\n");
            fclose(out);
        }
    }
};

statistics stats;

bool env_flag(const char * name, bool otherwise) {
    const char * value = getenv(name);
    return value ? atoi(value) != 0 : otherwise;
}

} // namespace

//
// function constants
//

struct ggml_metal_cv {
    std::vector<emulator::constant_value> values;

    void set(int id, emulator::constant_kind kind, int32_t value) {
        for (emulator::constant_value & v : values) {
            if (v.id == id) {
                v = { id, kind, value };
                return;
            }
        }
        values.push_back({ id, kind, value });
    }
};

ggml_metal_cv_t ggml_metal_cv_init(void) {
    return new ggml_metal_cv();
}

void ggml_metal_cv_free(ggml_metal_cv_t cv) {
    delete cv;
}

void ggml_metal_cv_set_int16(ggml_metal_cv_t cv, int16_t value, int32_t idx) {
    cv->set(idx, emulator::constant_kind::int16, value);
}

void ggml_metal_cv_set_int32(ggml_metal_cv_t cv, int32_t value, int32_t idx) {
    cv->set(idx, emulator::constant_kind::int32, value);
}

void ggml_metal_cv_set_bool(ggml_metal_cv_t cv, bool value, int32_t idx) {
    cv->set(idx, emulator::constant_kind::boolean, value);
}

//
// pipelines
//

struct ggml_metal_pipeline {
    const emulator::kernel_entry *        kernel = nullptr;
    std::string                           name;
    std::vector<emulator::constant_value> constants;
};

ggml_metal_pipeline_t ggml_metal_pipeline_init(void) {
    return new ggml_metal_pipeline();
}

void ggml_metal_pipeline_free(ggml_metal_pipeline_t pipeline) {
    delete pipeline;
}

// On a GPU fewer where a kernel takes many registers.
int ggml_metal_pipeline_max_theads_per_threadgroup(struct ggml_metal_pipeline_with_params pipeline) {
    GGML_UNUSED(pipeline);
    static const char * value = getenv("GGML_METAL_EMULATED_MAX_THREADS");
    return value ? atoi(value) : emulator::lanes_per_simdgroup*emulator::max_simdgroups;
}

//
// libraries
//

struct ggml_metal_library {
    ggml_metal_device_t    dev;
    ggml_metal_pipelines_t pipelines;
    std::mutex             mutex;
};

// A file that isn't on the list of libraries isn't compiled on a Mac either.
static bool library_is_listed(const char * name) {
    static const bool all = env_flag("GGML_METAL_EMULATED_ALL_LIBRARIES", false);
    for (const char * listed : metal_library_names) {
        if (strcmp(listed, name) == 0) {
            return true;
        }
    }
    return all;
}

static bool library_is_present(const char * name) {
    for (const emulator::kernel_entry & k : emulator::registered_kernels()) {
        if (strcmp(k.library, name) == 0) {
            return true;
        }
    }
    return false;
}

ggml_metal_library_t ggml_metal_library_init(ggml_metal_device_t dev) {
    ggml_metal_library_t res = new ggml_metal_library();
    res->dev       = dev;
    res->pipelines = ggml_metal_pipelines_init();
    return res;
}

ggml_metal_library_t ggml_metal_library_init_from_source(ggml_metal_device_t dev, const char * source, bool verbose) {
    GGML_UNUSED(dev);
    GGML_UNUSED(source);
    GGML_UNUSED(verbose);
    GGML_LOG_ERROR("%s: the emulated device has no compiler\n", __func__);
    return nullptr;
}

void ggml_metal_library_free(ggml_metal_library_t lib) {
    if (lib) {
        ggml_metal_pipelines_free(lib->pipelines);
        delete lib;
    }
}

ggml_metal_device_t ggml_metal_library_get_device(ggml_metal_library_t lib) {
    return lib->dev;
}

struct ggml_metal_pipeline_with_params ggml_metal_library_get_pipeline(ggml_metal_library_t lib, const char * name) {
    std::lock_guard<std::mutex> lock(lib->mutex);
    struct ggml_metal_pipeline_with_params res = {};
    res.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    return res;
}

// GGML_METAL_EMULATED_CONSTANTS=id=value,...: replaces values of function constants that pipelines are made with, to see
// whether a test notices.
static void plant_constants(std::vector<emulator::constant_value> & values) {
    const char * text = getenv("GGML_METAL_EMULATED_CONSTANTS");
    while (text && *text) {
        char * end;
        const long id = strtol(text, &end, 10);
        if (end == text || *end != '=') {
            fail("GGML_METAL_EMULATED_CONSTANTS: no id=value at '%s'", text);
        }
        text = end + 1;
        const long value = strtol(text, &end, 10);
        if (end == text || (*end && *end != ',')) {
            fail("GGML_METAL_EMULATED_CONSTANTS: no value at '%s'", text);
        }
        text = *end ? end + 1 : end;
        for (emulator::constant_value & v : values) {
            if (v.id == id) {
                v.value = value;
            }
        }
    }
}

// Metal refuses a value of another type than the kernel declares.
static bool constants_fit(const emulator::kernel_entry & kernel, const std::vector<emulator::constant_value> & values) {
    for (const emulator::function_constant & c : emulator::registered_constants()) {
        if (strcmp(c.library, kernel.library) != 0) {
            continue;
        }
        for (const emulator::constant_value & v : values) {
            if (v.id == c.id && v.kind != c.kind) {
                GGML_LOG_ERROR("%s: function constant %s (%d) is set as another type\n", kernel.name, c.name, c.id);
                return false;
            }
        }
    }
    return true;
}

struct ggml_metal_pipeline_with_params ggml_metal_library_compile_pipeline(
        ggml_metal_library_t lib, const char * base, const char * name, ggml_metal_cv_t cv) {
    std::lock_guard<std::mutex> lock(lib->mutex);

    struct ggml_metal_pipeline_with_params res = {};
    res.pipeline = ggml_metal_pipelines_get(lib->pipelines, name);
    if (res.pipeline) {
        return res;
    }

    const emulator::kernel_entry * kernel = emulator::find_kernel(base);
    // without bfloat the kernels that use it are not compiled
    if (!kernel || !library_is_listed(kernel->library) || (!lib->dev->props.has_bfloat && strstr(base, "bf16"))) {
        GGML_LOG_ERROR("%s: kernel not found in any metal library: base = '%s', name = '%s'%s\n", __func__, base, name,
                kernel ? " (its file is not on the list of libraries)" : "");
        return res;
    }
    if (cv && !constants_fit(*kernel, cv->values)) {
        GGML_LOG_ERROR("%s: failed to compile pipeline: base = '%s', name = '%s'\n", __func__, base, name);
        return res;
    }

    res.pipeline         = ggml_metal_pipeline_init();
    res.pipeline->kernel = kernel;
    res.pipeline->name   = name;
    if (cv) {
        res.pipeline->constants = cv->values;
        plant_constants(res.pipeline->constants);
    }
    ggml_metal_pipelines_add(lib->pipelines, name, res.pipeline);
    return res;
}

//
// encoders
//

namespace {

// what the `metal` member of a buffer id points to
struct device_memory {
    char * data;
    size_t size;
};

struct encoded_dispatch {
    ggml_metal_pipeline_t pipeline;
    emulator::dispatch    work;
    std::vector<std::vector<char>> bytes; // set_bytes, copied as Metal does
};

} // namespace

struct ggml_metal_encoder {
    bool concurrent;

    ggml_metal_pipeline_t pipeline = nullptr;
    emulator::dispatch    state    = {};
    std::map<int, std::vector<char>> bytes; // by index

    // Between two barriers a concurrent encoder leaves the order open. They are run in the order of the schedule, so
    // that a barrier that is missing shows.
    std::vector<encoded_dispatch> waiting;
    uint64_t n_flushes = 0;

    void flush() {
        static const bool trace = env_flag("GGML_METAL_EMULATED_TRACE", false);
        ++n_flushes;
        for (uint32_t i : emulator::order_of(waiting.size(), n_flushes)) {
            encoded_dispatch & e = waiting[i];
            if (trace) {
                fprintf(stderr, "emulated Metal device: %s: grid (%u, %u, %u), threads (%u, %u, %u), threadgroup memory %zu\n",
                        e.pipeline->name.c_str(), e.work.threadgroups[0], e.work.threadgroups[1], e.work.threadgroups[2],
                        e.work.threads[0], e.work.threads[1], e.work.threads[2], e.work.threadgroup_memory[0]);
            }
            stats.add(e.pipeline->name, emulator::run(e.work));
        }
        waiting.clear();
    }
};

ggml_metal_encoder_t ggml_metal_encoder_init(ggml_metal_cmd_buf_t cmd_buf_raw, bool concurrent) {
    GGML_UNUSED(cmd_buf_raw);
    ggml_metal_encoder_t res = new ggml_metal_encoder();
    res->concurrent = concurrent;
    return res;
}

void ggml_metal_encoder_free(ggml_metal_encoder_t encoder) {
    encoder->flush();
    delete encoder;
}

void ggml_metal_encoder_debug_group_push(ggml_metal_encoder_t encoder, const char * name) {
    GGML_UNUSED(encoder);
    GGML_UNUSED(name);
}

void ggml_metal_encoder_debug_group_pop(ggml_metal_encoder_t encoder) {
    GGML_UNUSED(encoder);
}

void ggml_metal_encoder_set_pipeline(ggml_metal_encoder_t encoder, struct ggml_metal_pipeline_with_params pipeline) {
    if (!pipeline.pipeline) {
        GGML_ABORT("%s: nil Metal pipeline (missing kernel; see compile_pipeline log above)\n", __func__);
    }
    encoder->pipeline = pipeline.pipeline;
}

static void check_index(int idx, int n) {
    if (idx < 0 || idx >= n) {
        fail("argument index %d", idx);
    }
}

void ggml_metal_encoder_set_bytes(ggml_metal_encoder_t encoder, void * data, size_t size, int idx) {
    check_index(idx, emulator::max_buffers);
    if (size > 4096) {
        fail("set_bytes with %zu bytes, Metal takes 4096", size);
    }
    encoder->bytes[idx] = std::vector<char>((char *) data, (char *) data + size);
    encoder->state.arguments.buffers[idx] = nullptr;
}

void ggml_metal_encoder_set_buffer(ggml_metal_encoder_t encoder, struct ggml_metal_buffer_id buffer, int idx) {
    check_index(idx, emulator::max_buffers);
    encoder->bytes.erase(idx);
    const device_memory * memory = (const device_memory *) buffer.metal;
    if (memory && buffer.offs > memory->size) {
        fail("a buffer of %zu bytes set at offset %zu", memory->size, buffer.offs);
    }
    encoder->state.arguments.buffers[idx] = memory ? memory->data + buffer.offs : nullptr;
}

void ggml_metal_encoder_set_threadgroup_memory_size(ggml_metal_encoder_t encoder, size_t size, int idx) {
    GGML_ASSERT(size % 16 == 0);
    check_index(idx, emulator::max_threadgroup_arguments);
    encoder->state.threadgroup_memory[idx] = size;
}

void ggml_metal_encoder_dispatch_threadgroups(ggml_metal_encoder_t encoder, int tg0, int tg1, int tg2, int tptg0, int tptg1, int tptg2) {
    encoder->waiting.emplace_back();
    encoded_dispatch & e = encoder->waiting.back();
    e.pipeline       = encoder->pipeline;
    e.work           = encoder->state;
    e.work.function  = encoder->pipeline->kernel;
    e.work.constants = &encoder->pipeline->constants;
    const int sizes[6] = { tg0, tg1, tg2, tptg0, tptg1, tptg2 };
    for (int i = 0; i < 3; ++i) {
        if (sizes[i] < 0 || sizes[3 + i] < 0) {
            fail("%s: dispatch of (%d, %d, %d) x (%d, %d, %d)", e.pipeline->name.c_str(), tg0, tg1, tg2, tptg0, tptg1, tptg2);
        }
        e.work.threadgroups[i] = sizes[i];
        e.work.threads[i]      = sizes[3 + i];
    }
    for (const auto & item : encoder->bytes) {
        e.bytes.push_back(item.second);
        e.work.arguments.buffers[item.first] = e.bytes.back().data();
    }
    // threadgroup memory that this kernel doesn't take stays set in Metal too, and counts for nothing
    for (int i = 0; i < emulator::max_threadgroup_arguments; ++i) {
        if (!(e.work.function->threadgroup_arguments >> i & 1)) {
            e.work.threadgroup_memory[i] = 0;
        }
    }
    if (!encoder->concurrent) {
        encoder->flush();
    }
}

void ggml_metal_encoder_memory_barrier(ggml_metal_encoder_t encoder) {
    encoder->flush();
}

void ggml_metal_encoder_end_encoding(ggml_metal_encoder_t encoder) {
    encoder->flush();
}

//
// residency sets: none
//

ggml_metal_rsets_t ggml_metal_rsets_init(ggml_metal_device_t dev) {
    GGML_UNUSED(dev);
    return nullptr;
}

void ggml_metal_rsets_free(ggml_metal_rsets_t rsets) {
    GGML_UNUSED(rsets);
}

void ggml_metal_device_rsets_add(ggml_metal_device_t dev, ggml_metal_rset_t rset) {
    GGML_UNUSED(dev);
    GGML_UNUSED(rset);
}

void ggml_metal_device_rsets_rm(ggml_metal_device_t dev, ggml_metal_rset_t rset) {
    GGML_UNUSED(dev);
    GGML_UNUSED(rset);
}

void ggml_metal_device_rsets_keep_alive(ggml_metal_device_t dev) {
    GGML_UNUSED(dev);
}

//
// the device
//

const char * ggml_metal_device_id_token(enum ggml_metal_device_id id) {
    return id == GGML_METAL_DEVICE_M1 ? "GGML_METAL_DEVICE_M1" : "GGML_METAL_DEVICE_GENERIC";
}

// GGML_METAL_EMULATED_LIST: what the emulator leaves to others
static void print_not_run_list() {
    for (const not_run_entry & entry : not_run_list) {
        if (!library_is_present(entry.library)) {
            fprintf(stderr, "emulated Metal device: doesn't run %s: no kernels of %s; %s\n", ggml_op_name(entry.op),
                    entry.library, entry.reason);
        }
    }
}

ggml_metal_device_t ggml_metal_device_init(int device, int n_devices) {
    GGML_UNUSED(n_devices);
    ggml_metal_device_t dev = new ggml_metal_device();

    // nothing lives at these addresses: a host that touches them faults
    dev->next_virtual_address = (char *) 0x400;

    struct ggml_metal_device_props & props = dev->props;
    props.device                     = device;
    props.device_phys                = 0;
    props.device_virt                = device;
    props.has_simdgroup_reduction    = env_flag("GGML_METAL_EMULATED_SIMDGROUP_REDUCTION", true);
    props.has_simdgroup_mm           = env_flag("GGML_METAL_EMULATED_SIMDGROUP_MM", true);
    props.has_unified_memory         = env_flag("GGML_METAL_EMULATED_UNIFIED_MEMORY", true);
    props.has_bfloat                 = env_flag("GGML_METAL_EMULATED_BFLOAT", true) && !getenv("GGML_METAL_BF16_DISABLE");
    props.has_tensor                 = false;
    props.use_residency_sets         = false;
    props.use_shared_buffers         = props.has_unified_memory;
    if (getenv("GGML_METAL_SHARED_BUFFERS_DISABLE")) {
        props.use_shared_buffers = false;
    }
    if (getenv("GGML_METAL_SHARED_BUFFERS_ENABLE")) {
        props.use_shared_buffers = true;
    }
    props.supports_gpu_family_apple7 = true;
    props.device_id                  = GGML_METAL_DEVICE_M1;
    props.gpu_family                 = 7;
    props.op_offload_min_batch_size  = getenv("GGML_OP_OFFLOAD_MIN_BATCH") ? atoi(getenv("GGML_OP_OFFLOAD_MIN_BATCH")) : 32;
    props.max_buffer_size            = (size_t) 8 << 30;
    props.max_working_set_size       = (size_t) 16 << 30;
    props.max_theadgroup_memory_size = emulator::current_settings().max_threadgroup_memory;
    snprintf(props.name, sizeof(props.name), "MTL%d", device);
    snprintf(props.desc, sizeof(props.desc), "emulated Metal device");

    const char * debug = getenv("GGML_METAL_FUSION_DEBUG");
    dev->finfo   = ggml_metal_fusion_info_init(!getenv("GGML_METAL_FUSION_DISABLE"), debug ? atoi(debug) : 0);
    dev->library = ggml_metal_library_init(dev);

    if (env_flag("GGML_METAL_EMULATED_LIST", false)) {
        print_not_run_list();
    }
    return dev;
}

void ggml_metal_device_free(ggml_metal_device_t dev) {
    ggml_metal_fusion_info_free(dev->finfo);
    ggml_metal_library_free(dev->library);
    delete dev;
}

void * ggml_metal_device_get_obj(ggml_metal_device_t dev) {
    return dev;
}

void * ggml_metal_device_get_queue(ggml_metal_device_t dev) {
    return dev;
}

ggml_metal_library_t ggml_metal_device_get_library(ggml_metal_device_t dev) {
    return dev->library;
}

void ggml_metal_device_get_memory(ggml_metal_device_t dev, size_t * free, size_t * total) {
    *total = dev->props.max_working_set_size;
    *free  = *total;
}

static bool emulator_runs(ggml_metal_device_t dev, const struct ggml_tensor * op) {
    // a product with a Hadamard matrix has kernels of its own
    if (op->op == GGML_OP_MUL_MAT && ggml_metal_op_mul_mat_use_fwht(op, dev->props.max_theadgroup_memory_size)) {
        return true;
    }
    for (const not_run_entry & entry : not_run_list) {
        if (entry.op == op->op && !library_is_present(entry.library)) {
            return false;
        }
    }
    return true;
}

bool ggml_metal_device_supports_op(ggml_metal_device_t dev, const struct ggml_tensor * op) {
    return metal_supports_op(dev, op) && emulator_runs(dev, op);
}

const struct ggml_metal_device_props * ggml_metal_device_get_props(ggml_metal_device_t dev) {
    return &dev->props;
}

struct ggml_metal_fusion_info * ggml_metal_device_get_fusion_info(ggml_metal_device_t dev) {
    return dev->finfo;
}

//
// events: all is done when they are recorded
//

struct ggml_metal_event {
    int unused;
};

void ggml_metal_event_encode_signal(ggml_metal_event_t ev, ggml_metal_cmd_buf_t cmd_buf) {
    GGML_UNUSED(ev);
    GGML_UNUSED(cmd_buf);
}

void ggml_metal_event_encode_wait(ggml_metal_event_t ev, ggml_metal_cmd_buf_t cmd_buf) {
    GGML_UNUSED(ev);
    GGML_UNUSED(cmd_buf);
}

ggml_metal_event_t ggml_metal_device_event_init(ggml_metal_device_t dev) {
    GGML_UNUSED(dev);
    return new ggml_metal_event();
}

void ggml_metal_device_event_free(ggml_metal_device_t dev, ggml_metal_event_t ev) {
    GGML_UNUSED(dev);
    delete ev;
}

void ggml_metal_device_event_synchronize(ggml_metal_device_t dev, ggml_metal_event_t ev) {
    GGML_UNUSED(dev);
    GGML_UNUSED(ev);
}

//
// buffers
//

// as upstream's buffer type asks for, and enough for every type of a kernel
static constexpr size_t buffer_alignment = 64;

// what fresh memory holds: NaN in every floating-point type
static constexpr int fresh_byte = 0xff;

struct ggml_metal_buffer {
    void * all_data; // as the host addresses it
    size_t all_size;
    bool   is_shared;
    bool   owned;

    emulator::guarded_memory own;
    device_memory            memory; // as kernels see it

    char * host_to_device(const void * p) const { return memory.data + ((const char *) p - (const char *) all_data); }
};

ggml_metal_buffer_t ggml_metal_buffer_init(ggml_metal_device_t dev, size_t size, bool shared) {
    ggml_metal_buffer_t res = new ggml_metal_buffer();
    res->own = emulator::guarded_allocate(std::max<size_t>(size, 1), buffer_alignment, "the end of a buffer");
    if (!res->own.data) {
        GGML_LOG_ERROR("%s: error: failed to allocate buffer, size = %8.2f MiB\n", __func__, size/1024.0/1024.0);
        delete res;
        return nullptr;
    }
    memset(res->own.data, fresh_byte, size);
    res->memory    = { res->own.data, size };
    res->owned     = true;
    res->all_size  = size;
    res->is_shared = shared && dev->props.use_shared_buffers;
    if (res->is_shared) {
        res->all_data = res->own.data;
    } else {
        std::lock_guard<std::mutex> lock(dev->mutex);
        res->all_data = dev->next_virtual_address;
        dev->next_virtual_address += (size + 4095)/4096*4096;
    }
    return res;
}

// the host's memory: no guard, no fill
ggml_metal_buffer_t ggml_metal_buffer_map(ggml_metal_device_t dev, void * ptr, size_t size, size_t max_tensor_size) {
    GGML_UNUSED(dev);
    GGML_UNUSED(max_tensor_size);
    ggml_metal_buffer_t res = new ggml_metal_buffer();
    res->all_data  = ptr;
    res->all_size  = size;
    res->is_shared = true;
    res->memory    = { (char *) ptr, size };
    return res;
}

void ggml_metal_buffer_free(ggml_metal_buffer_t buf) {
    if (buf->owned) {
        emulator::guarded_free(buf->own);
    }
    delete buf;
}

void * ggml_metal_buffer_get_base(ggml_metal_buffer_t buf) {
    return buf->all_data;
}

bool ggml_metal_buffer_is_shared(ggml_metal_buffer_t buf) {
    return buf->is_shared;
}

void ggml_metal_buffer_memset_tensor(ggml_metal_buffer_t buf, struct ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    memset(buf->host_to_device(tensor->data) + offset, value, size);
}

void ggml_metal_buffer_set_tensor(ggml_metal_buffer_t buf, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    memcpy(buf->host_to_device(tensor->data) + offset, data, size);
}

void ggml_metal_buffer_get_tensor(ggml_metal_buffer_t buf, const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, buf->host_to_device(tensor->data) + offset, size);
}

bool ggml_metal_buffer_cpy_tensor(ggml_metal_buffer_t buf, const struct ggml_tensor * src, struct ggml_tensor * dst) {
    ggml_metal_buffer_t buf_src = (ggml_metal_buffer_t) src->buffer->context;
    memcpy(buf->host_to_device(dst->data), buf_src->host_to_device(src->data), ggml_nbytes(src));
    return true;
}

void ggml_metal_buffer_clear(ggml_metal_buffer_t buf, uint8_t value) {
    memset(buf->memory.data, value, buf->all_size);
}

struct ggml_metal_buffer_id ggml_metal_buffer_get_id(ggml_metal_buffer_t buf, const struct ggml_tensor * t) {
    const ptrdiff_t offset = (const char *) t->data - (const char *) buf->all_data;
    if (offset < 0 || offset + ggml_nbytes(t) > buf->all_size) {
        GGML_LOG_ERROR("%s: error: tensor '%s' buffer is nil\n", __func__, t->name);
        return { nullptr, 0 };
    }
    return { &buf->memory, (size_t) offset };
}
