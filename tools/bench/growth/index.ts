// Each group has a process of its own: its heap and its compiled code have nothing of the others.

import { writeFile } from "node:fs/promises";
import { join } from "node:path";
import { linePeer } from "../../clients/python.js";
import { plot } from "../plot.js";
import { alone } from "../report.js";
import type { Run } from "../run.js";
import type { Measured } from "./run-group.js";

const RUN_GROUP = join(import.meta.dirname, "./run-group.ts");
export const GROUPS = ["scheduler", "worker", "plan", "nixl", "proxy", "fleet"];

export const growth = (run: Run) =>
  run.parts(Object.fromEntries(GROUPS.map((name) => [name, () => measureGroup(name, run)])), run);

export async function runGroup(name: string, form: readonly string[]) {
  const args = ["--expose-gc", "--import", "tsx", RUN_GROUP, name, ...form];
  const group = linePeer(process.execPath, args);
  const measured = await group.ask<Measured>({});
  await group.close();
  return measured;
}

async function measureGroup(name: string, run: Run) {
  const { title, missing, curves, rows } = await runGroup(name, run.short ? ["--short"] : []);
  if (missing !== undefined) return [alone(name, missing, "-")];
  const exponents = rows.map(({ ratio = Number.NaN }) => ` (${ratio.toFixed(2)})`);
  const named = curves.map((curve, at) => ({ ...curve, name: curve.name + exponents[at] }));
  const file = new URL(`../../../docs/bench/growth-${name}.svg`, import.meta.url);
  if (run.record) await writeFile(file, plot(title, named));
  return rows;
}
