// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <future>

#include "base/clock.h"
#include "check.h"
#include "folder.h"
#include "lib/os/fd.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

const std::string kSource = R"(def train():
    for epoch in range(3):
        while more():
            step(
                batch,
            )
            if last:
                log()
        # no statement: for x in y
        evaluate()
    else:
        save()
    report()
    def helper():
        go()
for job in jobs: train()
)";

std::vector<size_t> around(size_t number) { return loops_around(kSource, number); }

const char* stacks = nullptr;  // what the signal handler writes to stacks_pipe, as Python's does
int stacks_pipe = -1;

void write_stacks(int) {
  const size_t bytes = std::strlen(stacks);
  if (write(stacks_pipe, stacks, bytes) != static_cast<ssize_t>(bytes)) _exit(1);
}

// The report of a process whose Python writes `text`; its text without the first line, which tells the main thread's
// state.
StackReporter::Stacks report_of(const std::string& text, bool with_loops = false) {
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const Fd reading(ends[0]), writing(ends[1]);
  stacks = text.c_str();
  stacks_pipe = writing.get();
  const int number = free_signal();
  signal(number, write_stacks);
  StackReporter::Stacks told;
  const Deadline patience = Deadline::in(std::chrono::seconds(30));
  do {  // a busy machine may run the handler too late
    std::promise<StackReporter::Stacks> promise;
    StackReporter reporter({number, reading.get(), {"/own/farandole"}});
    reporter.ask(with_loops, [&](StackReporter::Stacks one) { promise.set_value(std::move(one)); });
    told = promise.get_future().get();
  } while (told.text.starts_with("Python has not answered") && !patience.expired());
  signal(number, SIG_DFL);
  const size_t line = told.text.find('\n') + 1;
  CHECK(told.text.starts_with("thread " + std::to_string(getpid()) + " ("));
  told.text.erase(0, line);
  return told;
}

const std::string kMain = "Current thread 0x2 (most recent call first):\n";
const std::string kOther = "Thread 0x1 (most recent call first):\n";
const std::string kFrame = "  File \"train.py\", line 4 in step\n";
const std::string kOwn = "  File \"/own/farandole/calls.py\", line 9 in wait\n";

}  // namespace

TEST(a_line_is_in_the_loops_whose_blocks_hold_it) {
  const std::vector<size_t> both{2, 3}, outer{2}, none;
  CHECK(around(5) == both);  // in the middle of a call
  CHECK(around(8) == both);  // under a condition
  CHECK(around(3) == both);  // the statement itself asks for the next one
  CHECK(around(10) == outer);
  CHECK(around(12) == none);  // `else` of the loop
  CHECK(around(13) == none);
  CHECK(around(15) == none);  // a function that stands in none
  CHECK(around(16) == std::vector<size_t>{16});
}

TEST(a_line_that_is_not_there_is_in_no_loop) {
  CHECK(around(0).empty());
  CHECK(around(400).empty());
  CHECK(loops_around("", 1).empty());
}

TEST(a_report_begins_with_the_main_thread_s_first_line_of_the_user) {
  const std::string text = kOther + kOwn + "\n" + kMain + kOwn + kOwn + kFrame + kOwn + "\n";
  CHECK_EQ(report_of(text).text, kMain + kFrame + kOwn + kOther + "\n\n\n");
  CHECK_EQ(report_of(kMain + kFrame).text, kMain + kFrame);
}

TEST(the_main_thread_is_alone_if_no_other_runs_python_that_may_call) {
  const std::string quiet = "  File \"/x/tqdm/_monitor.py\", line 60 in run\n" + kFrame;
  CHECK(report_of(kMain + kFrame).main_alone);
  CHECK(report_of(kOther + "  <no Python frame>\n\n" + kMain + kFrame).main_alone);
  CHECK(report_of(kOther + quiet + "\n" + kMain + kFrame).main_alone);
  CHECK(report_of(kMain + kFrame + "\n" + kOther + quiet).main_alone);
  CHECK(!report_of(kOther + kFrame + "\n" + kMain + kFrame).main_alone);
  CHECK(!report_of(kMain + kFrame + "\n" + kOther + kFrame).main_alone);
  CHECK(!report_of(kOther + kFrame + "\n" + kOther + quiet + "\n" + kMain).main_alone);
  CHECK(!report_of(kMain + kFrame + "...\n").main_alone);  // Python lists no more threads
  CHECK(!report_of(kOther + quiet).main_alone);
}

TEST(frames_of_the_user_show_their_loops) {
  const check::Folder folder;
  write_text_file(folder.path("train.py"), kSource);
  const auto frame = [&](const std::string& name, int line) {
    return "  File \"" + folder.path(name) + "\", line " + std::to_string(line) + " in f";
  };
  std::string libraries = frame("missing.py", 5) + "\n  File \"<string>\", line 5 in f\n";
  for (const std::string library : {"site-packages", "dist-packages", "lib/python3.11"}) {
    std::filesystem::create_directories(folder.path(library));
    write_text_file(folder.path(library + "/x.py"), kSource);
    libraries += frame(library + "/x.py", 5) + "\n";
  }
  const std::string text = kMain + frame("train.py", 5) + "\n" + frame("train.py", 16) + "\n" +
                           frame("train.py", 12) + "\n" + libraries;
  CHECK_EQ(report_of(text, true).text, kMain + frame("train.py", 5) +
                                           ", in the loop of line 2 and of line 3\n" +
                                           frame("train.py", 16) + ", in the loop of line 16\n" +
                                           frame("train.py", 12) + "\n" + libraries);
}

TEST(a_long_report_ends_with_a_whole_line) {
  std::string text = kMain;
  while (text.size() < 5000) text += kFrame;
  const std::string told = report_of(text).text;
  CHECK(told.size() < 4000 && told.size() > 3800);
  CHECK_EQ(told, text.substr(0, told.size() - 4) + "\n...");
  CHECK(told.ends_with(kFrame.substr(0, kFrame.size() - 1) + "\n..."));
}

TEST(without_stacks_the_states_of_threads_are_told) {
  const int number = free_signal();
  const auto text = [&] {
    std::promise<std::string> promise;
    StackReporter reporter({number, -1, {}});
    reporter.ask(false, [&](StackReporter::Stacks told) { promise.set_value(told.text); });
    return promise.get_future().get();
  };
  const std::string begin =
      "Python has not answered the signal: its main thread blocks it, or can't "
      "run now\nthread " +
      std::to_string(getpid()) + " (";
  CHECK(text().starts_with(begin));  // no handler
  signal(number, [](int) {});
  CHECK(text().starts_with(begin));  // one that writes nothing
  signal(number, SIG_DFL);
}

TEST(a_harmless_signal_does_nothing_and_is_not_free) {
  const int number = free_signal();
  make_harmless(number);
  CHECK_EQ(raise(number), 0);
  CHECK_EQ(free_signal(), number - 1);
  static bool handled = false;
  signal(number, [](int) { handled = true; });
  make_harmless(number);
  CHECK_EQ(raise(number), 0);
  CHECK(handled);
  signal(number, SIG_DFL);
  CHECK_EQ(free_signal(), number);
}

}  // namespace farandole
