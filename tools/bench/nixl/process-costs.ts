import { readFileSync, writeFileSync } from "node:fs";
import { performance } from "node:perf_hooks";

/**
 * The time in ms that the JavaScript thread was busy during `work`: calls, callbacks and garbage
 * collection, without waits for events.
 */
export async function onThread<T>(work: () => Promise<T>): Promise<{ value: T; busyMs: number }> {
  const before = performance.eventLoopUtilization();
  const value = await work();
  return { value, busyMs: performance.eventLoopUtilization(before).active };
}

/** The peak growth of the process's resident memory during `work`, in MiB. */
export async function peakGrowthMib<T>(
  work: () => Promise<T>,
): Promise<{ value: T; growthMib: number }> {
  // Resets the peak to the current size; see proc(5).
  writeFileSync("/proc/self/clear_refs", "5");
  const before = peakKib();
  const value = await work();
  return { value, growthMib: (peakKib() - before) / 1024 };
}

function peakKib(): number {
  const [, kib] = /^VmHWM:\s+(\d+) kB$/m.exec(readFileSync("/proc/self/status", "utf8")) ?? [];
  return Number(kib);
}
