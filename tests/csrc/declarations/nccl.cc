// SPDX-License-Identifier: Apache-2.0
// Compiled, never run: our declarations of NCCL beside NVIDIA's nccl.h.
#include <nccl.h>

#include "declarations/same_abi.h"
#include "lib/gpu/nccl.h"

namespace nccl = farandole::nccl;
using Api = nccl::Api;
using farandole::DType;
using farandole::ReduceOp;

static_assert(nccl::kSuccess == ncclSuccess);
static_assert(nccl::kInProgress == ncclInProgress);
constexpr int number(DType type) { return farandole::traits_of(type).nccl; }
static_assert(number(DType::kInt8) == ncclInt8 && number(DType::kUInt8) == ncclUint8);
static_assert(number(DType::kInt32) == ncclInt32 && number(DType::kUInt32) == ncclUint32);
static_assert(number(DType::kInt64) == ncclInt64 && number(DType::kUInt64) == ncclUint64);
static_assert(number(DType::kFloat16) == ncclFloat16 && number(DType::kBFloat16) == ncclBfloat16);
static_assert(number(DType::kFloat32) == ncclFloat32 && number(DType::kFloat64) == ncclFloat64);
constexpr int number(ReduceOp op) { return farandole::traits_of(op).nccl; }
static_assert(number(ReduceOp::kSum) == ncclSum && number(ReduceOp::kProduct) == ncclProd);
static_assert(number(ReduceOp::kMax) == ncclMax && number(ReduceOp::kMin) == ncclMin);
static_assert(sizeof(nccl::UniqueId) == sizeof(ncclUniqueId));
static_assert(std::is_same_v<nccl::Comm, ncclComm_t>);
using Config = nccl::ConfigV21400;
constexpr ncclConfig_t kTheirConfig = NCCL_CONFIG_INITIALIZER;
static_assert(Config().magic == kTheirConfig.magic);
static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(Config, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(Config, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));

static_assert(alike(&Api::get_version, &ncclGetVersion));
static_assert(alike(&Api::unique_id, &ncclGetUniqueId));
static_assert(alike(&Api::init_rank, &ncclCommInitRankConfig));
static_assert(alike(&Api::destroy, &ncclCommDestroy));
static_assert(alike(&Api::finalize, &ncclCommFinalize));
static_assert(alike(&Api::abort, &ncclCommAbort));
static_assert(alike(&Api::async_error, &ncclCommGetAsyncError));
static_assert(alike(&Api::error_text, &ncclGetErrorString));
static_assert(alike(&Api::last_error, &ncclGetLastError));
static_assert(alike(&Api::all_reduce, &ncclAllReduce));
static_assert(alike(&Api::broadcast, &ncclBroadcast));
static_assert(alike(&Api::reduce, &ncclReduce));
static_assert(alike(&Api::all_gather, &ncclAllGather));
static_assert(alike(&Api::reduce_scatter, &ncclReduceScatter));
static_assert(alike(&Api::send, &ncclSend));
static_assert(alike(&Api::receive, &ncclRecv));
static_assert(alike(&Api::group_start, &ncclGroupStart));
static_assert(alike(&Api::group_end, &ncclGroupEnd));
