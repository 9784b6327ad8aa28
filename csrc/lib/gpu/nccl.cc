// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/nccl.h"

#include "base/error.h"
#include "lib/os/dl.h"

namespace farandole::nccl {
namespace {

void fill_all(const DynamicLibrary& library, Api& api) {
  library.fill(api.unique_id, "ncclGetUniqueId");
  library.fill(api.init_rank, "ncclCommInitRankConfig");
  library.fill(api.destroy, "ncclCommDestroy");
  library.fill(api.finalize, "ncclCommFinalize");
  library.fill(api.abort, "ncclCommAbort");
  library.fill(api.async_error, "ncclCommGetAsyncError");
  library.fill(api.error_text, "ncclGetErrorString");
  library.fill(api.last_error, "ncclGetLastError");
  library.fill(api.all_reduce, "ncclAllReduce");
  library.fill(api.broadcast, "ncclBroadcast");
  library.fill(api.reduce, "ncclReduce");
  library.fill(api.all_gather, "ncclAllGather");
  library.fill(api.reduce_scatter, "ncclReduceScatter");
  library.fill(api.send, "ncclSend");
  library.fill(api.receive, "ncclRecv");
  library.fill(api.group_start, "ncclGroupStart");
  library.fill(api.group_end, "ncclGroupEnd");
}

}  // namespace

// If NCCL's last error text mentions a CUDA stream capture, appends advice about captures. NCCL's result code does not
// show that a capture was the cause. NCCL's own threads connect peers, and CUDA forbids these threads to wait for a
// stream while another thread captures in global mode.
std::string Api::text_of(Result result, Comm comm) const {
  const char* found = last_error(comm);
  const std::string words = found ? found : "";
  return error_text(result) +
         (words.empty() ? "; set NCCL_DEBUG=INFO to see more" : " (" + words + ")") +
         (words.find("captur") != words.npos ? cuda::kOutsideOfCaptures : "") +
         (result == kInProgress ? "; unset NCCL_COMM_BLOCKING, because 0 is not supported" : "");
}

void Api::check(Result result, const char* what, Comm comm) const {
  if (result == kSuccess) return;
  throw Error(ErrorCode::kLibrary, std::string(what) + ": " + text_of(result, comm));
}

std::shared_ptr<const Api> open(const std::vector<std::string>& paths) {
  const auto library =
      DynamicLibrary::open(paths, "NCCL", "run: pip install nvidia-nccl-cu13 (or -cu12)");
  auto api = std::make_shared<Api>();
  api->path = library.name();
  library.fill(api->get_version, "ncclGetVersion");
  api->check(api->get_version(&api->version), "ncclGetVersion");
  if (api->version < kFirstWithConfig) {
    throw Error(ErrorCode::kLibrary,
                api->path + " is NCCL " + std::to_string(api->version) +
                    "; farandole needs 2.14 or newer; run: pip install -U nvidia-nccl-cu13");
  }
  fill_all(library, *api);
  return api;
}

}  // namespace farandole::nccl
