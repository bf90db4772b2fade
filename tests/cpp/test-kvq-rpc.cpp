// SPDX-License-Identifier: MIT
//
// What a server of upstream's RPC backend makes of type ids that a client sends: ours are types, gaps are refused.
// Its class is in no header, so the source is included; nothing listens and nothing connects.

#include "ggml-rpc.cpp"

#include "kvq-formats.h"

#include <cstdio>

int main() {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // refusals are what is tested

    ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    int n_failed = 0;
    {
        rpc_server server({ backend }, nullptr);
        for (uint32_t id = 0; id < 600; id++) {
            rpc_msg_get_alloc_size_req request = {};
            rpc_msg_get_alloc_size_rsp response = {};
            request.tensor.id   = 1;
            request.tensor.type = id;
            const uint32_t ne[] = { 512, 3, 1, 1 };
            memcpy(request.tensor.ne, ne, sizeof(ne));

            const bool known = id < GGML_TYPE_COUNT && ggml_type_size((ggml_type) id) > 0;
            if (known) {
                request.tensor.nb[0] = ggml_type_size((ggml_type) id);
                request.tensor.nb[1] = ggml_row_size((ggml_type) id, ne[0]);
                request.tensor.nb[2] = request.tensor.nb[3] = 3*request.tensor.nb[1];
            }
            const bool taken = server.get_alloc_size(request, response);
            if (taken != known || (taken && response.alloc_size < 3*request.tensor.nb[1])) {
                printf("FAIL type %u: taken %d, %zu bytes\n", id, taken, size_t(response.alloc_size));
                n_failed++;
            }
            if (kvq_get_format((ggml_type) id) && !known) {
                printf("FAIL type %u is ours and unknown\n", id);
                n_failed++;
            }
        }
    }
    ggml_backend_free(backend);
    printf("%d failed\n", n_failed);
    return n_failed ? 1 : 0;
}
