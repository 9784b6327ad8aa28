// SPDX-License-Identifier: Apache-2.0
// What this rank has submitted and what the log has taught it: which request each id stands for.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/message.h"
#include "core/handles.h"

namespace farandole {

// One tensor on its way, as this rank submitted it.
struct Submission {
  Handle handle = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::vector<int64_t> shape;   // of the input, with its own first dimension
  std::vector<int64_t> splits;  // alltoall
  struct NamedRequest* named = nullptr;
};

// A name that this rank uses.
struct NamedRequest {
  Request request;    // as last submitted
  uint32_t id = 0;    // as the log says; 0: not yet, or not any more
  Request defined;    // what the id stands for
  bool in_flight = false;
  bool reported = false;  // in flight, and not yet seen in the log
  Submission submission;
};

// Not thread-safe: the runtime holds its mutex.
class PendingTable {
 public:
  // Throws Error(kInvalidArgument) if a call of this name is in flight already.
  void check_free(const Request& request) const;
  bool in_flight(const Request& request) const;
  // Inserts; returns the report that tells the coordinator.
  Ready submit(const Request& request, Submission submission, Contribution contribution);
  // The key under which peers wait for a call that this rank refuses.
  CallKey refuse(const Request& request);

  // ---- the log
  void define(const Define& define);
  void forget(uint32_t id);
  const Request& request_of(uint32_t id) const;
  // This rank's part of a call that the log settles; nullopt: it did not submit (it has joined).
  std::optional<Submission> take(uint32_t id, uint64_t sequence);
  std::optional<Submission> take(const CallKey& key);
  // The call is over: its name is free again.
  void finish(const Submission& submission) {
    if (submission.named) submission.named->in_flight = false;
  }
  void resume(SetId set, uint64_t next_sequence);  // after join
  // All that was reported and not settled; they are gone from the table.
  std::vector<Submission> take_all();

 private:
  struct UnnamedCalls {
    uint64_t next = 0;
    std::map<uint64_t, Submission> waiting;
  };
  static std::string key_of(SetId set, const std::string& name);
  static std::string interned_key(const Request& request);
  NamedRequest& named(const Request& request);

  std::unordered_map<std::string, std::unique_ptr<NamedRequest>> named_;
  std::map<SetId, UnnamedCalls> unnamed_;
  std::unordered_map<std::string, uint32_t> interned_;  // signatures of unnamed calls
  std::vector<std::optional<Request>> by_id_;
};

}  // namespace farandole
