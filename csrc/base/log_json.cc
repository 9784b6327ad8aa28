// SPDX-License-Identifier: Apache-2.0
#include "base/log_json.h"

#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/json.h"

namespace farandole {

std::string json_line(const LogLine& line) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  Json json;
  json.open('{');
  json.member("time_ns", int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec);
  json.member("level", name_of(line.level));
  json.member("rank", line.rank);
  json.member("host", line.host);
  json.member("pid", ::getpid());
  json.member("text", line.text);
  if (line.left_out > 0) json.member("left_out", line.left_out);
  json.close('}');
  return json.text() + "\n";
}

std::string (*log_format_of(const std::string& name))(const LogLine&) {
  if (name == "text") return plain_line;
  if (name == "json") return json_line;
  throw Error(ErrorCode::kInvalidArgument,
              "FARANDOLE_LOG_FORMAT='" + name + "' is neither text nor json");
}

}  // namespace farandole
