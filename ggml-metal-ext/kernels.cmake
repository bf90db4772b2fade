# SPDX-License-Identifier: MIT
#
# Adds our kernel files to METALLIB_KERNEL_SOURCES, the list of ggml-metal's CMakeLists.txt. Upstream's build inlines only the
# headers it knows, so ours are inlined here. kvq-metal.h has the same list for the loader.

set(KVQ_METAL_KERNELS kvq_fa_vec kvq_rows)

# kvq-metal-codecs.h includes kvq-metal-impl.h: in this order
set(KVQ_METAL_HEADERS kernels/kvq-metal-codecs.h kvq-metal-impl.h)

foreach(kind IN LISTS KVQ_METAL_KERNELS)
    file(READ "${CMAKE_CURRENT_LIST_DIR}/kernels/${kind}.metal" source)
    foreach(header IN LISTS KVQ_METAL_HEADERS)
        get_filename_component(name "${header}" NAME)
        file(READ "${CMAKE_CURRENT_LIST_DIR}/${header}" text)
        string(REPLACE "#pragma once\n" "" text "${text}")
        string(REPLACE "#include \"${name}\"" "${text}" source "${source}")
    endforeach()
    if(source MATCHES "#include \"([^\"]*kvq[^\"]*)\"")
        message(FATAL_ERROR "${kind}.metal includes ${CMAKE_MATCH_1}, which is not in KVQ_METAL_HEADERS")
    endif()
    set(flat "${CMAKE_CURRENT_BINARY_DIR}/kvq-kernels/${kind}.metal")
    file(CONFIGURE OUTPUT "${flat}" CONTENT "${source}" @ONLY)
    list(APPEND METALLIB_KERNEL_SOURCES "${flat}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/kernels/${kind}.metal")
endforeach()
foreach(header IN LISTS KVQ_METAL_HEADERS)
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/${header}")
endforeach()
