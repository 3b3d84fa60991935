import { median } from "../report.js";
import type { Way } from "./contestants.js";

/** How many times as long pull takes: of the medians, on the terminal as in the table. */
export function gainOf(ttftMs: Readonly<Record<Way, readonly number[]>>, way: Way): number {
  return median(ttftMs.pull) / median(ttftMs[way]);
}
