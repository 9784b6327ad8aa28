// SPDX-License-Identifier: Apache-2.0
#include "watch/flight_view.h"

#include <fcntl.h>

#include <numeric>
#include <vector>

#include "base/error.h"
#include "watch/flight_text.h"

namespace farandole {

FlightView::FlightView(int fd)
    : segment_(Segment::map(Fd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)))),
      memory_(segment_.data(), segment_.size()) {
  if (memory_.fits()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "this memory holds no flight recorders of this build of farandole; use the very "
              "installation that the job runs");
}

std::string FlightView::text(int local, size_t events) const {
  if (local < 0 || local >= local_ranks()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no local rank " + std::to_string(local));
  }
  Json json;
  write_flight(json, memory_, local, events, "");
  return json.text();
}

void FlightView::dump(const std::string& folder, const std::string& reason) const {
  std::vector<int> locals(static_cast<size_t>(local_ranks()));
  std::iota(locals.begin(), locals.end(), 0);
  dump_flights(memory_, locals, folder, reason);
}

}  // namespace farandole
