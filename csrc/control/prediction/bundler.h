// SPDX-License-Identifier: Apache-2.0
// A rank's end of prediction. Reports pass through here on their way to the coordinator: those of a
// bundle are withheld until all of it is ready, and then one ReadyAll stands for them. Nothing else
// changes: to the coordinator it is as if they had come late, all at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

// Not thread-safe: the runtime holds its mutex. No thread, clock or channel inside.
class Bundler {
 public:
  // Of a set of this rank. under_way(id): this rank has reported such a call and the log has not
  // settled it yet. Then the round has begun without the bundle, and ends without it.
  void open(const Bundle& bundle, const std::function<bool(uint32_t)>& under_way);
  // A report on its way out, and the handle that it will end (0: none); appends what to send now.
  void pass(Report&& report, int64_t handle, std::vector<Report>& out);
  // As pass() of a Ready with input and this id, if it is withheld, or was the last of its bundle; false:
  // nothing was done.
  bool withhold(uint32_t id, int64_t handle, std::vector<Report>& out);
  // Somebody needs these handles: what is withheld of their bundles goes out.
  void await(std::span<const int64_t> handles, std::vector<Report>& out);
  // The log has said Unbundle.
  void close(uint32_t bundle, std::vector<Report>& out);
  // The job is broken: nothing of this will be needed.
  void clear();

  const std::vector<uint32_t>& ids_of(uint32_t bundle) const;
  int withheld() const { return withheld_; }  // calls

 private:
  enum class State : uint8_t {
    kJoining,  // each call is reported by itself once more
    kActive,
    kGivenUp,  // until Unbundle has come
  };
  struct Withheld {
    int32_t position;
    int64_t handle;
  };
  struct Opened {
    uint32_t id = 0;
    std::vector<uint32_t> ids;
    State state = State::kActive;
    std::vector<bool> seen;  // by position; while joining
    size_t seen_count = 0;
    std::vector<Withheld> withheld;  // in order of submission
  };
  struct Place {
    Opened* bundle = nullptr;
    int32_t position = 0;
  };

  Place place_of(uint32_t id) const { return id < places_.size() ? places_[id] : Place{}; }
  void pass_ready(Ready&& ready, int64_t handle, std::vector<Report>& out);
  static void join(Opened& bundle, int32_t position);
  void give_up(Opened& bundle, bool awaited, std::vector<Report>& out);

  std::map<uint32_t, Opened> bundles_;
  std::vector<Place> places_;  // by id of a request
  int withheld_ = 0;
};

}  // namespace farandole
