import type { Row } from "./report.js";

export class Run {
  readonly only: readonly string[] | undefined;
  readonly short: boolean;
  readonly record: boolean;
  readonly trace: string | undefined;

  constructor({
    only,
    short = false,
    record = false,
    trace,
  }: { only?: string; short?: boolean; record?: boolean; trace?: string }) {
    this.only = only?.split(",");
    this.short = short;
    this.trace = trace;
    this.record = record && !short;
  }

  /** Three in the short form. */
  rounds(count: number): number {
    return this.short ? Math.min(3, count) : count;
  }

  /** @throws A part that is not there. */
  async parts<Shared>(
    all: Readonly<Record<string, (shared: Shared) => Promise<readonly Row[]>>>,
    shared: Shared,
  ) {
    const rows: Row[] = [];
    for (const name of this.only ?? Object.keys(all)) {
      const measure = all[name];
      if (measure === undefined)
        throw new Error(`no part ${name}; there are ${Object.keys(all).join(", ")}`);
      process.stderr.write(`  ${name} …\n`);
      rows.push(...(await measure(shared)));
    }
    return rows;
  }
}
