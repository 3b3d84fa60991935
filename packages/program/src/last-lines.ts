import { printable } from "./print.js";

const KEPT_LINES = 6;
const LINE_CHARACTERS = 300;
const COLOURS = /\p{Cc}\[[\d;]*m/gu;
/** Routine lines of UCX and NIXL, and UCX's protocol tables. */
const QUIET = /UCX {2}(INFO|DEBUG|TRACE|REQ|DATA)|^[ID]\d{4} |\||\+-+\+/;

export function lastLines(output: string): string[] {
  return output
    .split(/[\r\n]+/)
    .map((line) => printable(line.replace(COLOURS, "")).trim())
    .filter((line) => line !== "" && !QUIET.test(line))
    .slice(-KEPT_LINES)
    .map((line) => (line.length > LINE_CHARACTERS ? `${line.slice(0, LINE_CHARACTERS)}…` : line));
}
