const KEPT_LINES = 6;
const LINE_CHARACTERS = 300;
/** Sequences that a terminal obeys, such as colours, and single control and format characters. */
const CONTROL = /\p{Cc}\[[\d;?]*[A-Za-z]|[\p{Cc}\p{Cf}]/gu;
/** What UCX and NIXL say when all is well, and the tables of protocols. */
const QUIET = /UCX {2}(INFO|DEBUG|TRACE|REQ|DATA)|^[ID]\d{4} |\||\+-+\+/;

/** What was found, and below it what the process said at its end, as far as it helps: six lines at most, without control characters. */
export function withWords(found: string, { output }: { readonly output: string }): string {
  const lines = output
    .split(/[\r\n]+/)
    .map((line) => line.replace(CONTROL, "").trim())
    .filter((line) => line !== "" && !QUIET.test(line))
    .slice(-KEPT_LINES)
    .map((line) => (line.length > LINE_CHARACTERS ? `${line.slice(0, LINE_CHARACTERS)}…` : line));
  return lines.length === 0 ? found : [found, "it said:", ...lines].join("\n");
}
