// SPDX-License-Identifier: Apache-2.0
// What `farandole doctor` asks about this process, as text; farandole.h has the form.
#pragma once

#include <string>

namespace farandole {

std::string text_of_mpi();
// `wanted`: FARANDOLE_INTERFACE. Throws as addresses_of() does.
std::string text_of_addresses(const std::string& wanted);

}  // namespace farandole
