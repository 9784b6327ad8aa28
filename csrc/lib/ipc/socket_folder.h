// SPDX-License-Identifier: Apache-2.0
// Where this user's Unix sockets lie, those of the Python package too: in a folder that no other user can enter. So no
// stranger calls them or takes their names. Any thread.
#pragma once

#include <string>

namespace farandole {

struct SocketFolder {
  std::string
      prefix;  // paths of sockets begin so; at most 64 bytes follow, none of them a comma, colon or blank
  std::string
      identity;  // equal for processes that can reach each other's sockets: machine, device, inode
};

// The first of /tmp/farandole-UID, $XDG_RUNTIME_DIR/farandole, /dev/shm/farandole-UID and ~/.farandole that can be had. Makes it, and
// removes the sockets of processes that have ended. Throws Error(kLibrary) with the remedy, if another user has taken
// all names or nothing can be written.
SocketFolder socket_folder();

}  // namespace farandole
