// SPDX-License-Identifier: Apache-2.0
#include "lib/mpi/mpi.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "lib/mpi/mpi_abi.h"
#include "lib/os/dl.h"

namespace farandole {
namespace {

template <class Abi>
class CommOf final : public MpiComm {
 public:
  CommOf(DynamicLibrary library, const void* handle)
      : library_(std::move(library)),
        mpi_(library_),
        byte_(Abi::predefined(library_, Abi::kByte)),
        request_null_(Abi::predefined(library_, Abi::kRequestNull)) {
    std::memcpy(&comm_, handle, sizeof comm_);
    check_usable();
    check(mpi_.comm_set_errhandler(comm_, Abi::predefined(library_, Abi::kErrorsReturn)),
          "MPI_Comm_set_errhandler");
  }

  int largest_tag() override {
    constexpr int kLeast = 32767;  // minimum in the MPI standard
    const int* largest = nullptr;
    int found = 0;
    check(mpi_.comm_get_attr(comm_, Abi::kTagUpperBound, &largest, &found), "MPI_Comm_get_attr");
    return found != 0 ? *largest : kLeast;
  }

 private:
  using Request = typename Abi::Request;
  static_assert(sizeof(Request) <= sizeof(int64_t));
  static constexpr int kSuccess = mpi_abi::kSuccess;

  static int64_t stored(Request request) {
    int64_t handle = 0;
    std::memcpy(&handle, &request, sizeof request);
    return handle;
  }
  static Request loaded(int64_t handle) {
    Request request;
    std::memcpy(&request, &handle, sizeof request);
    return request;
  }

  void check(int code, const char* call) {
    if (code == kSuccess) return;
    char text[Abi::kErrorTextBytes] = "unknown error";
    int length = 0;
    mpi_.error_string(code, text, &length);
    throw Error(ErrorCode::kLibrary, std::string(call) + ": " + text);
  }

  void check_usable() {
    int finalized = 0, threads = 0;
    check(mpi_.finalized(&finalized), "MPI_Finalized");
    if (finalized != 0) throw Error(ErrorCode::kLibrary, "MPI was finalised in this process");
    check(mpi_.query_thread(&threads), "MPI_Query_thread");
    if (threads >= Abi::kThreadMultiple) return;
    throw Error(ErrorCode::kLibrary,
                "MPI was initialised without MPI_THREAD_MULTIPLE, but farandole calls it from "
                "several threads. Remedy: leave mpi4py.rc.thread_level at 'multiple', "
                "or call MPI.Init_thread(MPI.THREAD_MULTIPLE)");
  }

  int64_t start_send(const std::byte* data, int bytes, int to, int tag) override {
    Request request;
    check(mpi_.issend(data, bytes, byte_, to, tag, comm_, &request), "MPI_Issend");
    return stored(request);
  }

  int64_t start_receive(std::byte* data, int bytes, int from, int tag) override {
    Request request;
    check(mpi_.irecv(data, bytes, byte_, from, tag, comm_, &request), "MPI_Irecv");
    return stored(request);
  }

  bool test(int64_t& handle, int receives) override {
    Request request = loaded(handle);
    typename Abi::Status status{};
    int done = 0, count = 0;
    const int code = mpi_.test(&request, &done, &status);
    handle = stored(request);
    check(code, "MPI_Test");
    if (done == 0 || receives < 0) return done != 0;
    check(mpi_.get_count(&status, byte_, &count), "MPI_Get_count");
    if (count == receives) return true;
    throw Error(ErrorCode::kInternal, "received " + std::to_string(count) + " bytes from rank " +
                                          std::to_string(status.source) + " instead of " +
                                          std::to_string(receives) +
                                          ": the ranks disagree about a bucket");
  }

  void cancel(int64_t handle) override {
    Request request = loaded(handle);
    if (request == request_null_) return;
    check(mpi_.cancel(&request), "MPI_Cancel");
  }

  const DynamicLibrary library_;
  const mpi_abi::Functions<Abi> mpi_;
  const typename Abi::Datatype byte_;
  const Request request_null_;
  typename Abi::Comm comm_;
};

// Finds the loaded MPI libraries by a symbol that profiling libraries lack, because the names of their files differ.
std::vector<DynamicLibrary> loaded_mpis() {
  return DynamicLibrary::that_define("PMPI_Initialized");
}

std::optional<DynamicLibrary> running_mpi() {
  for (DynamicLibrary& library : loaded_mpis()) {
    int initialized = 0;
    const auto ask = library.require<int(int*)>("PMPI_Initialized");
    if (ask(&initialized) == mpi_abi::kSuccess && initialized != 0) return std::move(library);
  }
  return std::nullopt;
}

// Returns the first line of MPI_Get_library_version, or "" if there is none.
std::string version_text(const DynamicLibrary& mpi) {
  constexpr size_t kLongest = 8192;  // the limit of the standard ABI; other ABIs have lower limits
  const auto ask = mpi.find<int(char*, int*)>("MPI_Get_library_version");
  std::string text(kLongest, '\0');
  int length = 0;
  if (ask == nullptr || ask(text.data(), &length) != mpi_abi::kSuccess) return "";
  return text.substr(0, text.find_first_of(std::string_view("\n\0", 2)));
}

enum class Abi { kOpenMpi, kMpich, kStandard, kUnknown };

Abi abi_of(const DynamicLibrary& mpi, const std::string& version) {
  if (mpi.find<void>("ompi_mpi_comm_world") != nullptr) return Abi::kOpenMpi;
  const auto ask = mpi.find<int(int*, int*)>("MPI_Abi_get_version");
  int major = -1, minor = -1;  // stays -1 with other ABIs
  if (ask != nullptr && ask(&major, &minor) == mpi_abi::kSuccess && major >= 1) {
    return Abi::kStandard;
  }
  const auto names = {"MPICH", "Intel(R) MPI", "MVAPICH", "ParaStation"};  // also Cray MPICH
  const bool mpich = std::ranges::any_of(
      names, [&](const char* name) { return version.find(name) != std::string::npos; });
  return mpich ? Abi::kMpich : Abi::kUnknown;
}

const char* name_of(Abi abi) {
  switch (abi) {
    case Abi::kOpenMpi: return "Open MPI's";
    case Abi::kMpich: return "MPICH's";
    case Abi::kStandard: return "MPI 5's standard one";
    case Abi::kUnknown: break;
  }
  return "";
}

}  // namespace

std::optional<MpiLibrary> mpi_of_process() {
  std::optional<DynamicLibrary> mpi = running_mpi();
  std::vector<DynamicLibrary> loaded = loaded_mpis();
  if (!mpi && !loaded.empty()) mpi = std::move(loaded.front());
  if (!mpi) return std::nullopt;
  const std::string version = version_text(*mpi);
  return MpiLibrary{mpi->name(), version, name_of(abi_of(*mpi, version))};
}

std::unique_ptr<MpiComm> MpiComm::borrow(const void* handle) {
  std::optional<DynamicLibrary> mpi = running_mpi();
  if (!mpi) throw Error(ErrorCode::kLibrary, "MPI is not running in this process");
  const std::string version = version_text(*mpi);
  switch (abi_of(*mpi, version)) {
    case Abi::kOpenMpi: return std::make_unique<CommOf<mpi_abi::OpenMpi>>(std::move(*mpi), handle);
    case Abi::kMpich: return std::make_unique<CommOf<mpi_abi::Mpich>>(std::move(*mpi), handle);
    case Abi::kStandard:
      return std::make_unique<CommOf<mpi_abi::Standard>>(std::move(*mpi), handle);
    case Abi::kUnknown: break;
  }
  throw Error(ErrorCode::kLibrary,
              mpi->name() + " (\"" + version +
                  "\") has an unknown binary interface. farandole knows Open MPI's (it defines "
                  "ompi_mpi_comm_world), MPICH's (its version text names MPICH, Intel, MVAPICH or "
                  "ParaStation) and MPI 5's (it defines MPI_Abi_get_version). Remedy: set "
                  "FARANDOLE_WIRE=tcp to use TCP between hosts");
}

bool MpiRequest::test() {
  if (comm_->test(handle_, receives_)) {
    comm_ = nullptr;
    return true;
  }
  return false;
}

void MpiRequest::cancel() {
  if (receives_ < 0) return;
  comm_->cancel(handle_);
  receives_ = -1;
}

}  // namespace farandole
