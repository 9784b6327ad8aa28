// SPDX-License-Identifier: Apache-2.0
// A process in which a real MPI runs, alone. FARANDOLE_TEST_MPI is the library's path.
#pragma once

#include <dlfcn.h>

#include <cstdlib>
#include <functional>
#include <string>

#include "check.h"
#include "lib/mpi/mpi_abi.h"

namespace farandole::check {

// MPI as mpi4py would have started it, with these thread rights. In a fork: MPI starts only once.
class Started {
 public:
  explicit Started(int threads) : path_(path()), library_(dlopen(path_.c_str(), RTLD_NOW)) {
    if (library_ == nullptr) fail(dlerror());
    int provided = 0;
    CHECK_EQ(function<int(int*, char***, int, int*)>("MPI_Init_thread")(nullptr, nullptr, threads,
                                                                        &provided),
             0);
    CHECK(provided >= threads);
  }
  ~Started() { function<int()>("MPI_Finalize")(); }

  // The address of a handle to MPI_COMM_SELF.
  const void* self() {
    if (path_.find(mpi_abi::OpenMpi::kLibrary) != std::string::npos) {
      open_mpi_self_ = dlsym(library_, "ompi_mpi_comm_self");
      CHECK(open_mpi_self_ != nullptr);
      return &open_mpi_self_;
    }
    return &mpich_self_;
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

  const std::string path_;
  void* const library_;
  void* open_mpi_self_ = nullptr;
  const int mpich_self_ = 0x44000001;
};

inline void with_mpi(int threads, const std::function<void(Started&)>& body) {
  if (Started::path().empty()) skip("FARANDOLE_TEST_MPI names no MPI library");
  run_in_fork([&] {
    Started mpi(threads);
    body(mpi);
  });
}

}  // namespace farandole::check
