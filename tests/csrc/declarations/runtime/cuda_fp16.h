// SPDX-License-Identifier: Apache-2.0
// nccl.h takes nothing from here.
#pragma once
