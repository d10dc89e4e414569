// SPDX-License-Identifier: Apache-2.0
// What illegal_statement.cpp includes, precompiled once for all statements. A main file needs no guard.
#include <utility>

#include "kv_flat/csrc/block_table.h"
#include "scheduler_fsm/csrc/request_state.h"
