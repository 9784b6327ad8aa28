// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages of the MPI that this process runs already: Open MPI or MPICH, found at run
// time. Any thread; errors are kLibrary, with MPI's own words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace farandole {

class MpiComm;

// A message under way. Its memory stays in use until test() has been true.
class MpiRequest {
 public:
  MpiRequest() = default;
  MpiRequest(MpiRequest&& other) noexcept;
  MpiRequest& operator=(MpiRequest&& other) noexcept;
  ~MpiRequest();  // one that is under way is left to MPI, for ever

  explicit operator bool() const { return comm_ != nullptr; }  // under way
  // True: it is complete, and this object empty. Throws also for a message of the wrong length.
  bool test();
  // A receive ends soon, without its message; a send goes on.
  void cancel();

 private:
  friend class MpiComm;
  MpiRequest(MpiComm& comm, int64_t handle, int receives)
      : comm_(&comm), handle_(handle), receives_(receives) {}

  MpiComm* comm_ = nullptr;
  int64_t handle_ = 0;  // an int or a pointer, as the library has it
  int receives_ = -1;   // bytes to come; -1: a send, or cancelled
};

// A communicator that somebody else owns; it must outlive this object and its requests.
class MpiComm {
 public:
  // handle: the address of an MPI_Comm of the library that is loaded. Throws if there is none, or if
  // it does not let several threads call.
  static std::unique_ptr<MpiComm> borrow(const void* handle);
  virtual ~MpiComm() = default;

  virtual const char* library() const = 0;
  virtual int rank() = 0;
  virtual int size() = 0;
  virtual int largest_tag() = 0;

  // Synchronous: complete when the receiver has it, so that nothing is left to MPI's care then.
  MpiRequest send(const std::byte* data, int bytes, int to, int tag) {
    return {*this, start_send(data, bytes, to, tag), -1};
  }
  MpiRequest receive(std::byte* data, int bytes, int from, int tag) {
    return {*this, start_receive(data, bytes, from, tag), bytes};
  }
  // All messages of this communicator end, on all ranks. False: this MPI cannot do that.
  virtual bool revoke() = 0;

 private:
  friend class MpiRequest;
  virtual int64_t start_send(const std::byte* data, int bytes, int to, int tag) = 0;
  virtual int64_t start_receive(std::byte* data, int bytes, int from, int tag) = 0;
  virtual bool test(int64_t& handle, int receives) = 0;
  virtual void cancel(int64_t handle) = 0;
  virtual void forget(int64_t handle) noexcept = 0;
};

}  // namespace farandole
