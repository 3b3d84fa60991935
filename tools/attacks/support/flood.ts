// Runs the flood of one attack file in a process of its own. Arguments: the file, and a
// `FloodTarget` as JSON. A line on stdin ends it.
import { once } from "node:events";
import { pathToFileURL } from "node:url";
import type { AttackModule, FloodTarget } from "./attack.js";

const [, , file = "", target = "{}"] = process.argv;
const { flood } = (await import(pathToFileURL(file).href)) as AttackModule;
const ended = new AbortController();
process.stdout.write(`${flood === undefined ? "none" : "begins"}\n`);
if (flood !== undefined) {
  void once(process.stdin, "data").then(() => ended.abort());
  await flood(JSON.parse(target) as FloodTarget, ended.signal);
}
process.exit(0);
