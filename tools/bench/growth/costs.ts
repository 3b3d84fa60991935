/**
 * Shorter times are not measured: `process.cpuUsage` counts microseconds, and the compiler and the
 * garbage collector work now and then.
 */
const MEASURABLE_MS = 50;

const PER_MS = { ns: 1e6, us: 1e3, ms: 1, s: 1e-3 } as const;
type TimeUnit = keyof typeof PER_MS;

/** Processor time of this process so far, with all of its threads, user and system, in ms. */
export function processorMs(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
}

/**
 * Processor time per item of `run`, which handles `items` items. It is repeated until the time can
 * be measured. The first time that is long enough does not count: V8 drops compiled code when the
 * fixture of the measurement before is collected.
 */
export async function processorTime(
  unit: TimeUnit,
  items: number,
  run: () => unknown,
): Promise<number> {
  collectGarbage();
  for (let [times, isWarm] = [1, false]; ; ) {
    const begunMs = processorMs();
    for (let i = 0; i < times; i++) {
      const running = run();
      if (running instanceof Promise) await running;
    }
    const tookMs = processorMs() - begunMs;
    if (tookMs < MEASURABLE_MS) times *= 2;
    else if (isWarm) return (tookMs * PER_MS[unit]) / (times * items);
    else isWarm = true;
  }
}

/** As `processorTime`, for work that needs a new fixture each time. Only `run` is measured. */
export async function processorTimeOf<Fixture>(
  unit: TimeUnit,
  items: number,
  work: {
    prepare(): Fixture | Promise<Fixture>;
    run(fixture: Fixture): unknown;
    finish?(fixture: Fixture): unknown;
  },
): Promise<number> {
  let [tookMs, times] = [0, 0];
  while (tookMs < MEASURABLE_MS) {
    const fixture = await work.prepare();
    if (times === 0) collectGarbage();
    const begunMs = processorMs();
    const running = work.run(fixture);
    if (running instanceof Promise) await running;
    tookMs += processorMs() - begunMs;
    times += 1;
    await work.finish?.(fixture);
  }
  return (tookMs * PER_MS[unit]) / (times * items);
}

/**
 * Bytes of the JavaScript heap and of buffers that the result of `build` holds, per item. Memory of
 * native code is not counted.
 */
export async function heldBytes<Held>(
  items: number,
  build: () => Held | Promise<Held>,
  close?: (held: Held) => unknown,
): Promise<number> {
  const before = usedBytes();
  const held = await build();
  const after = usedBytes();
  await close?.(held);
  return Math.max(1, after - before) / items;
}

function usedBytes(): number {
  collectGarbage();
  const { heapUsed, external } = process.memoryUsage();
  return heapUsed + external;
}

/** Errors: a process without --expose-gc. */
function collectGarbage(): void {
  const { gc } = globalThis as { gc?: () => void };
  if (gc === undefined) throw new Error("memory is measured in a process with --expose-gc");
  gc();
  gc();
}
