const KEPT_LINES = 6;
const LINE_CHARACTERS = 300;
/** Terminal escape sequences, such as colours, and single control and format characters. */
const CONTROL = /\p{Cc}\[[\d;?]*[A-Za-z]|[\p{Cc}\p{Cf}]/gu;
/** Lines that UCX and NIXL also write when all is well, and UCX's protocol tables. */
const QUIET = /UCX {2}(INFO|DEBUG|TRACE|REQ|DATA)|^[ID]\d{4} |\||\+-+\+/;

/** Appends the end of a process's output to a finding: the last six relevant lines, without control characters. */
export function withStderrTail(found: string, { output }: { readonly output: string }): string {
  const lines = output
    .split(/[\r\n]+/)
    .map((line) => line.replace(CONTROL, "").trim())
    .filter((line) => line !== "" && !QUIET.test(line))
    .slice(-KEPT_LINES)
    .map((line) => (line.length > LINE_CHARACTERS ? `${line.slice(0, LINE_CHARACTERS)}…` : line));
  return lines.length === 0 ? found : [found, "its output ended with:", ...lines].join("\n");
}
