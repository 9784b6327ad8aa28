// SPDX-License-Identifier: Apache-2.0
#include "watch/findings.h"

#include <cstring>

namespace farandole {

void Findings::add(const std::string& text) {
  std::lock_guard lock(mutex_);
  const std::string line = (lines_.length == 0 ? "" : "\n") + text;
  if (line.size() > FlightText::kBytes - lines_.length) return;
  std::memcpy(lines_.text + lines_.length, line.data(), line.size());
  lines_.length += line.size();
  page_.findings.write(lines_.length, lines_);  // a number that grows
}

}  // namespace farandole
