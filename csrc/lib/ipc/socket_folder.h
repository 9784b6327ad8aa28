// SPDX-License-Identifier: Apache-2.0
// The folder of this user's Unix sockets, also those of the Python package. No other user can enter it, so no stranger
// calls them or takes their names. Any thread.
#pragma once

#include <string>

namespace farandole {

struct SocketFolder {
  std::string
      prefix;  // start of socket paths; at most 64 bytes follow, without comma, colon or blank
  std::string
      identity;  // machine, device, inode: equal for processes that can reach each other's sockets
};

// Returns the first usable of /tmp/farandole-UID, $XDG_RUNTIME_DIR/farandole, /dev/shm/farandole-UID, ~/.farandole.
// Creates it, and removes sockets of ended processes. Throws Error(kLibrary) with a remedy if none is usable.
SocketFolder socket_folder();

}  // namespace farandole
