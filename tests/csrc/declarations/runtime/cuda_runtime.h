// SPDX-License-Identifier: Apache-2.0
// The few types that nccl.h takes from the CUDA runtime.
#pragma once

#include <cstddef>
#include <cstdint>

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
