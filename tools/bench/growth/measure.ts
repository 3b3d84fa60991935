import { median, type Row } from "../report.js";

/** A cost per item, at several sizes: in proportion to the items it is constant. */
export interface Quantity {
  readonly name: string;
  readonly unit: string;
  readonly sizeOf: string;
  /** Ascending, in steps of 4 or 10. The short form measures the first three. */
  readonly sizes: readonly number[];
  /** Wanted, without the tolerance. @default 0, a constant cost per item */
  readonly exponent?: number;
  readonly most?: number;
  /** Called several times, each time in a new fixture. */
  measure(size: number): number | Promise<number>;
}

/** Measured in one process, and drawn in one plot. */
export interface Group {
  readonly title: string;
  readonly quantities: readonly Quantity[];
  /** Why the group cannot be measured on this machine. */
  readonly missing?: string | undefined;
}

export interface Curve {
  readonly name: string;
  readonly sizes: readonly number[];
  readonly costs: readonly number[];
}

/** Colder caches at larger sizes are not growth of the work. */
export const TOLERANCE = 0.25;

/**
 * The exponent e of cost ~ size^e, by least squares of the logarithms. The larger of two fits: over
 * all sizes, and over the three largest, as a fixed cost hides growth at small sizes.
 */
export function growthExponent(sizes: readonly number[], costs: readonly number[]): number {
  const slope = (first: number) => {
    const logs = (values: readonly number[]) => values.slice(first).map(Math.log);
    const [xs, ys] = [logs(sizes), logs(costs)];
    const mean = (values: readonly number[]) =>
      values.reduce((sum, value) => sum + value, 0) / values.length;
    const [meanX, meanY] = [mean(xs), mean(ys)];
    return (
      mean(xs.map((x, i) => (x - meanX) * ((ys[i] ?? Number.NaN) - meanY))) /
      mean(xs.map((x) => (x - meanX) ** 2))
    );
  };
  return Math.max(slope(0), slope(-3));
}

const ROUNDS = 5;
/** At the two smallest sizes, so that V8 has compiled the code. */
const WARM_MS = 1000;

export async function measure(quantity: Quantity, short: boolean): Promise<Curve> {
  const sizes = short ? quantity.sizes.slice(0, 3) : quantity.sizes;
  for (const untilMs = processorMs() + WARM_MS; processorMs() < untilMs; )
    for (const size of sizes.slice(0, 2)) await quantity.measure(size);
  const runs = sizes.map((): number[] => []);
  for (let round = 0; round < ROUNDS; round++)
    for (const [i, size] of sizes.entries()) runs[i]?.push(await quantity.measure(size));
  return { name: quantity.name, sizes, costs: runs.map(median) };
}

export function rowOf(group: string, quantity: Quantity, { sizes, costs }: Curve): Row {
  const { name, sizeOf, unit, exponent = 0, most } = quantity;
  const growth = growthExponent(sizes, costs);
  const isCheap = most === undefined || Math.max(...costs) <= most;
  return {
    what: `${group}: ${name}; ${sizes.map(showSize).join(", ")} ${sizeOf}: exponent`,
    ours: `${costs.map((cost) => Number(cost.toPrecision(3)).toLocaleString("en")).join(", ")} ${unit}`,
    theirs: "-",
    ratio: growth,
    wanted: `<= ${exponent + TOLERANCE}${most === undefined ? "" : `, <= ${most} ${unit}`}`,
    met: growth <= exponent + TOLERANCE && isCheap,
  };
}

function showSize(size: number): string {
  if (size >= 1e6) return `${size / 1e6}M`;
  return size >= 1000 && size % 1000 === 0 ? `${size / 1000}k` : size.toLocaleString("en");
}

/** The compiler and the garbage collector work now and then. */
const MEASURABLE_MS = 50;

const PER_MS = { ns: 1e6, us: 1e3, ms: 1, s: 1e-3 } as const;
type TimeUnit = keyof typeof PER_MS;

/** With all threads, user and system. */
export function processorMs(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
}

export async function processorMsOf(run: () => unknown, times = 1): Promise<number> {
  const begunMs = processorMs();
  for (let i = 0; i < times; i++) {
    const running = run();
    if (running instanceof Promise) await running;
  }
  return processorMs() - begunMs;
}

/**
 * Processor time per item. The first time that is long enough does not count: V8 drops compiled
 * code when the fixture of the measurement before is collected.
 */
export async function processorTime(
  unit: TimeUnit,
  items: number,
  run: () => unknown,
): Promise<number> {
  collectGarbage();
  for (let [times, isWarm] = [1, false]; ; ) {
    const tookMs = await processorMsOf(run, times);
    if (tookMs < MEASURABLE_MS) times *= 2;
    else if (isWarm) return (tookMs * PER_MS[unit]) / (times * items);
    else isWarm = true;
  }
}

/** For work that needs a new fixture each time. Only `run` is measured. */
export async function processorTimeOf<Fixture>(
  unit: TimeUnit,
  items: number,
  prepare: () => Fixture | Promise<Fixture>,
  run: (fixture: Fixture) => unknown,
  finish: (fixture: Fixture) => unknown = () => undefined,
): Promise<number> {
  let [tookMs, times] = [0, 0];
  while (tookMs < MEASURABLE_MS) {
    const fixture = await prepare();
    if (times === 0) collectGarbage();
    tookMs += await processorMsOf(() => run(fixture));
    times += 1;
    await finish(fixture);
  }
  return (tookMs * PER_MS[unit]) / (times * items);
}

/** Bytes of the JavaScript heap and of buffers, per item. Memory of native code is not counted. */
export async function heldBytes<Held>(
  items: number,
  build: () => Held | Promise<Held>,
  close: (held: Held) => unknown = () => undefined,
): Promise<number> {
  const before = usedBytes();
  const held = await build();
  const after = usedBytes();
  await close(held);
  return Math.max(1, after - before) / items;
}

function usedBytes(): number {
  collectGarbage();
  const { heapUsed, external } = process.memoryUsage();
  return heapUsed + external;
}

/** @throws A process without --expose-gc. */
function collectGarbage() {
  const { gc } = globalThis as { gc?: () => void };
  if (gc === undefined) throw new Error("memory is measured in a process with --expose-gc");
  gc();
  gc();
}
