import { readFileSync, writeFileSync } from "node:fs";
import { performance } from "node:perf_hooks";

/** How long the JavaScript thread was at work until `work` was done, in ms: calls, callbacks and collection, but not what it waited for events. */
export async function onThread<T>(work: () => Promise<T>): Promise<{ value: T; busyMs: number }> {
  const before = performance.eventLoopUtilization();
  const value = await work();
  return { value, busyMs: performance.eventLoopUtilization(before).active };
}

/** By how much the process's resident memory was larger, at its peak, than before `work`. */
export async function peakGrowthMib<T>(work: () => Promise<T>): Promise<{ value: T; growthMib: number }> {
  // Sets the peak to what there is now; see proc(5).
  writeFileSync("/proc/self/clear_refs", "5");
  const before = peakKib();
  const value = await work();
  return { value, growthMib: (peakKib() - before) / 1024 };
}

function peakKib(): number {
  const [, kib] = /^VmHWM:\s+(\d+) kB$/m.exec(readFileSync("/proc/self/status", "utf8")) ?? [];
  return Number(kib);
}
