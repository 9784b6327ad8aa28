// SPDX-License-Identifier: Apache-2.0
// The core's only exception type. The error code crosses the C ABI and selects the Python exception class.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace farandole {

// These values are part of the C ABI (farandole.h) and of messages between ranks, so only append to them.
enum class ErrorCode : int32_t {
  kOk = 0,
  kInternal = 1,         // FarandoleError: a bug in farandole
  kInvalidArgument = 2,  // ValueError
  kWrongType = 3,        // TypeError
  kMismatch = 4,         // MismatchError: ranks disagree about one tensor
  kPeer = 5,             // PeerError: a rank died, failed or left
  kStall = 6,            // StallError: a deadline passed
  kShutdown = 7,         // ShutdownError: used before init or after shutdown
  kLibrary = 8,          // LibraryError: a call into MPI, NCCL, CUDA or the kernel failed
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string text) : std::runtime_error(std::move(text)), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// Throws Error(kLibrary) for a failed system call, with `what`, the error number's text and, if given, `remedy`.
[[noreturn]] void throw_system_error(const std::string& what, int error_number,
                                     const std::string& remedy = {});

// An error as a value, for log entries and handles. Converts to false if there is no error.
struct Failure {
  ErrorCode code = ErrorCode::kOk;
  std::string text;
  explicit operator bool() const { return code != ErrorCode::kOk; }
};

}  // namespace farandole
