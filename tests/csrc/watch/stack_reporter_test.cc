// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <future>
#include <thread>

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

struct Sockets {
  Sockets() {
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    core = Fd(ends[0]), python = Fd(ends[1]);
  }
  Fd core, python;
};

StackReporter::Stacks report_from(const StackSource& source, bool with_loops = false) {
  std::promise<StackReporter::Stacks> promise;
  StackReporter reporter(source);
  reporter.ask(with_loops, [&](StackReporter::Stacks one) { promise.set_value(std::move(one)); });
  return promise.get_future().get();
}

// Checks and removes the first line, which tells the main thread's state.
std::string after_first_line(const std::string& text) {
  CHECK(text.starts_with("thread " + std::to_string(getpid()) + " ("));
  return text.substr(text.find('\n') + 1);
}

// The report of a process whose Python answers with `answer`.
StackReporter::Stacks report_of(const std::string& answer, bool with_loops = false) {
  const Sockets sockets;
  std::thread python([&, asked = '\0']() mutable {
    while (read(sockets.python.get(), &asked, 1) == 1) {
      CHECK_EQ(write(sockets.python.get(), answer.data(), answer.size()),
               static_cast<ssize_t>(answer.size()));
    }
  });
  StackReporter::Stacks told;
  const Deadline patience = Deadline::in(std::chrono::seconds(30));
  do {  // a busy machine may run the thread too late
    told = report_from({.socket = sockets.core.get()}, with_loops);
  } while (told.text.starts_with("Python has not answered") && !patience.expired());
  shutdown(sockets.core.get(), SHUT_RDWR);
  python.join();
  told.text = after_first_line(told.text);
  return told;
}

int stacks_pipe = -1;

const std::string kMain = "Main thread (most recent call first):\n";
const std::string kFrame = "  File \"train.py\", line 4 in step\n";

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

TEST(python_s_thread_tells_the_stacks_and_whether_the_main_thread_is_alone) {
  const StackReporter::Stacks told = report_of("0" + kMain + kFrame);
  CHECK_EQ(told.text, kMain + kFrame);
  CHECK(!told.main_alone);
  CHECK(report_of("1" + kMain + kFrame).main_alone);
}

TEST(an_answer_that_comes_too_late_is_in_no_other_report) {
  const Sockets sockets;
  CHECK_EQ(write(sockets.python.get(), "1late", 5), 5);
  CHECK(report_from({.socket = sockets.core.get()}).text.starts_with("Python has not answered"));
}

TEST(the_signal_tells_the_main_thread_s_stack_if_python_s_thread_cannot_run) {
  Sockets sockets;
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
  const Fd reading(ends[0]), writing(ends[1]);
  stacks_pipe = writing.get();
  const int number = free_signal();
  signal(number, [](int) {  // what faulthandler writes, in two steps
    for (const char* text :
         {"Stack (most recent call first):\n", "  File \"train.py\", line 4\n"}) {
      if (write(stacks_pipe, text, std::strlen(text)) < 0) _exit(1);
    }
  });
  for (const bool thread_lives : {true, false}) {
    if (!thread_lives) sockets.python.reset();
    StackReporter::Stacks told;
    const Deadline patience = Deadline::in(std::chrono::seconds(30));
    do {  // a busy machine may run the handler too late
      told = report_from({sockets.core.get(), number, reading.get()});
    } while (told.text.starts_with("Python has not answered") && !patience.expired());
    CHECK_EQ(after_first_line(told.text), kMain + "  File \"train.py\", line 4\n");
    CHECK(!told.main_alone);
  }
  signal(number, SIG_DFL);
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
  CHECK_EQ(report_of("1" + text, true).text,
           kMain + frame("train.py", 5) + ", in the loop of line 2 and of line 3\n" +
               frame("train.py", 16) + ", in the loop of line 16\n" + frame("train.py", 12) + "\n" +
               libraries);
}

TEST(a_long_report_ends_with_a_whole_line) {
  std::string text = kMain;
  while (text.size() < 5000) text += kFrame;
  const std::string told = report_of("0" + text).text;
  CHECK(told.size() < 4000 && told.size() > 3800);
  CHECK_EQ(told, text.substr(0, told.size() - 4) + "\n...");
  CHECK(told.ends_with(kFrame.substr(0, kFrame.size() - 1) + "\n..."));
}

TEST(without_stacks_the_states_of_threads_are_told) {
  const std::string state = "thread " + std::to_string(getpid()) + " (";
  CHECK(report_from({}).text.starts_with(state));  // a process without Python
  const Sockets sockets;
  const int number = free_signal();
  const auto text = [&] { return report_from({sockets.core.get(), number, -1}).text; };
  const std::string begin =
      "Python has not answered: it is exiting, or native code holds its GIL and no signal reaches "
      "the main thread\n" +
      state;
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
