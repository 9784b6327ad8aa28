// SPDX-License-Identifier: Apache-2.0
// A process in which a real MPI runs, alone. FARANDOLE_TEST_MPI is the library's path.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>

#include "check.h"
#include "lib/mpi/mpi_abi.h"

namespace farandole::check {

// MPI as mpi4py would have started it. In a fork: MPI starts only once.
class Started {
 public:
  // `all_threads`: MPI_THREAD_MULTIPLE; else MPI_THREAD_SERIALIZED.
  explicit Started(bool all_threads) : library_(dlopen(path().c_str(), RTLD_NOW)) {
    if (library_ == nullptr) fail(dlerror());
    int threads = 2, provided = 0, major = -1, minor = -1;
    const auto abi = function<int(int*, int*)>("MPI_Abi_get_version");
    open_mpi_self_ = dlsym(library_, "ompi_mpi_comm_self");
    standard_ =
        open_mpi_self_ == nullptr && abi != nullptr && abi(&major, &minor) == 0 && major > 0;
    if (standard_) threads = 2048;
    if (all_threads) {
      threads = standard_ ? mpi_abi::Standard::kThreadMultiple : mpi_abi::Mpich::kThreadMultiple;
    }
    CHECK_EQ(function<int(int*, char***, int, int*)>("MPI_Init_thread")(nullptr, nullptr, threads,
                                                                        &provided),
             0);
    CHECK(provided >= threads);
  }
  ~Started() { function<int()>("MPI_Finalize")(); }

  // The address of a handle to MPI_COMM_SELF.
  const void* self() const {
    if (open_mpi_self_ != nullptr) return &open_mpi_self_;
    return standard_ ? static_cast<const void*>(&standard_self_) : &mpich_self_;
  }

  std::string abi() const {
    if (open_mpi_self_ != nullptr) return "Open MPI's";
    return standard_ ? "MPI 5's standard one" : "MPICH's";
  }

  static std::string path() {
    const char* path = std::getenv("FARANDOLE_TEST_MPI");
    return path == nullptr ? "" : path;
  }

 private:
  template <class Function>
  Function* function(const char* name) {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }

  void* const library_;
  void* open_mpi_self_ = nullptr;
  bool standard_ = false;
  const intptr_t standard_self_ = 0x102;
  const int mpich_self_ = 0x44000001;
};

inline void with_mpi(const std::function<void(Started&)>& body, bool all_threads = true) {
  if (Started::path().empty()) skip("FARANDOLE_TEST_MPI names no MPI library");
  run_in_fork([&] {
    Started mpi(all_threads);
    body(mpi);
  });
}

}  // namespace farandole::check
