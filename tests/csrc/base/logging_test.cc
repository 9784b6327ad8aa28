// SPDX-License-Identifier: Apache-2.0
// The log's lines: who, what, and how many were left out.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "base/logging.h"
#include "check.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// What `body` writes to stderr; less than a pipe holds.
std::string logged(const LogSettings& settings, const std::function<void()>& body) {
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const int before = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  set_log(settings);
  body();
  set_log({});
  dup2(before, STDERR_FILENO);
  std::string text(1 << 16, '\0');
  const ssize_t got = read(ends[0], text.data(), text.size());
  for (int fd : {ends[0], ends[1], before}) close(fd);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

}  // namespace

TEST(rank_and_host_come_first) {
  const std::string text = logged({LogLevel::kInfo, 3, "node7"}, [] {
    log(LogLevel::kDebug, "not told");
    log(LogLevel::kWarning, "slow");
  });
  CHECK_EQ(text, "[rank 3 on node7] farandole warning: slow\n");
}

TEST(no_terminal_obeys_a_line) {
  CHECK_EQ(printable("a\x1b]0;b\x07\xc2\x9b\x7f"), "a\\x1b]0;b\\x07\\x9b\\x7f");
  CHECK_EQ(printable("one\ntwo\t\xc3\xa4 \xc2\xa0"), "one\ntwo\t\xc3\xa4 \xc2\xa0");
  const std::string text =
      logged({LogLevel::kInfo, 0, "h"}, [] { log(LogLevel::kError, "x\x1b[2J"); });
  CHECK(contains(text, "x\\x1b[2J"));
}

TEST(a_json_line_is_one_line) {
  const std::string text =
      logged({LogLevel::kInfo, 0, "a\"b", json_line}, [] { log(LogLevel::kError, "two\nlines"); });
  CHECK_EQ(std::count(text.begin(), text.end(), '\n'), 1);
  CHECK(contains(text, R"("level":"error")"));
  CHECK(contains(text, R"("host":"a\"b")"));
  CHECK(contains(text, R"("text":"two\u000alines")"));
}

TEST(a_flood_is_cut_and_counted) {
  const std::string text = logged({LogLevel::kInfo, 0, "h", plain_line, 5}, [] {
    for (int i = 0; i < 100; ++i) log(LogLevel::kWarning, "again");
    log(LogLevel::kError, "the end");  // never cut
  });
  const auto lines = std::count(text.begin(), text.end(), '\n');
  CHECK(lines >= 6 && lines < 20);
  CHECK(contains(text, "the end (" + std::to_string(101 - lines) + " lines left out before)"));
}

TEST(formats_have_names) {
  CHECK(log_format_of("json") == json_line);
  CHECK(log_format_of("text") == plain_line);
}
