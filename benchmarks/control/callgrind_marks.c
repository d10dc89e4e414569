// SPDX-License-Identifier: Apache-2.0
// Client requests of callgrind as functions that Python can call through ctypes.
#include <valgrind/callgrind.h>

void start_instrumentation(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop_instrumentation(void) { CALLGRIND_STOP_INSTRUMENTATION; }
void toggle_collect(void) { CALLGRIND_TOGGLE_COLLECT; }
void dump_stats(const char *label) { CALLGRIND_DUMP_STATS_AT(label); }
void zero_stats(void) { CALLGRIND_ZERO_STATS; }
