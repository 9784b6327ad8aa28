// SPDX-License-Identifier: Apache-2.0
// A GPU made of host memory, for tests: libgpu_double.so holds the functions of the CUDA driver, NVRTC and
// NCCL that the core calls. Streams are queues that one thread works off late and in a random order that
// CUDA allows, so a missing wait shows as wrong data. Ranks are threads of one process. This header is
// what tests use to steer it; look the functions up in the library.
#pragma once

#include <cstdint>

#include "lib/gpu/cuda.h"

namespace farandole::check {

extern "C" {
// The order in which streams advance from here on.
void gpu_double_seed(uint64_t seed);
// The stream stops here until gpu_double_open(gate): a slow kernel of the user. Returns the gate.
int gpu_double_gate(cuda::Stream stream);
void gpu_double_open(int gate);
// Host code as a kernel of the user.
void gpu_double_call(cuda::Stream stream, void (*function)(void*), void* argument);
// Calls of `function` ("ncclAllReduce") fail with `result` after `calls` more successful ones, until
// gpu_double_heal(). A result below 0 is a signal: the process dies there.
void gpu_double_fail(const char* function, int calls, int result);
void gpu_double_heal();
// Every communicator of this rank reports this asynchronous error from now on; its work never ends.
void gpu_double_break_rank(int rank, int result);
// ncclGroupEnd blocks, and launches nothing, until this is false again.
void gpu_double_hold_launches(bool held);
// ncclCommAbort does not return until this is false again.
void gpu_double_hold_aborts(bool held);
// The calling thread begins to capture the stream into a graph, in global mode.
void gpu_double_capture(cuda::Stream stream);
// It ends. What cuStreamEndCapture says: 0, or that somebody has spoiled the graph.
int gpu_double_end_capture(cuda::Stream stream);
// What NCCL_ALGO was when the last communicator was made.
const char* gpu_double_algorithm();
// The names of NVTX ranges since the last time, one a line. Valid until the thread asks again.
const char* gpu_double_ranges();
// What a library of NCCL's real host code says when it is loaded, instead of registering device code: its version, the
// names of its device functions in the order of their table, one a line, and of each kernel the host's address.
void gpu_double_nccl_code(int version, const char* functions);
void gpu_double_nccl_kernel(const void* host_function, const char* name);
// What is alive: streams, events, allocations, communicators; 0 when everything was given back.
int gpu_double_alive();
}

}  // namespace farandole::check
