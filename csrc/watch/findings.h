// SPDX-License-Identifier: Apache-2.0
// What looked wrong to a rank, though nothing has failed: kept for good in its flight recorder, as far as there is room.
#pragma once

#include <mutex>
#include <string>

#include "watch/flight_memory.h"

namespace farandole {

class Findings {
 public:
  explicit Findings(FlightPage& page) : page_(page) {}

  // Any thread.
  void add(const std::string& text);

 private:
  FlightPage& page_;
  std::mutex mutex_;
  FlightText lines_{};
};

}  // namespace farandole
