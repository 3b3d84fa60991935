import { holdsLatents, showBytes, showHeads } from "./quantities.js";
import type { PairReport } from "./report.js";

/** The pair as a Mermaid flow chart: bytes flow along solid arrows, mere notifications along dotted ones. */
export function renderMermaid(report: PairReport): string {
  if (report.outcome === "refused") {
    return ["graph LR", `  refused["refused: ${escapeMermaid(report.reason)}"]`, ""].join("\n");
  }
  const isMla = holdsLatents(report.groups);
  const lines = ["graph LR"];
  lines.push(`  subgraph prefill["prefill, TP ${report.prefill.tpSize}"]`);
  for (const { prefillRank, awaits } of report.notifications)
    lines.push(`    P${prefillRank}["P${prefillRank}, waits for ${awaits}"]`);
  lines.push("  end", `  subgraph decode["decode, TP ${report.decode.tpSize}"]`);
  for (const { decodeRank, heads } of report.ranks)
    lines.push(`    D${decodeRank}["D${decodeRank}${isMla ? "" : `, heads ${showHeads(heads)}`}"]`);
  lines.push("  end");
  for (const rank of report.ranks) {
    for (const read of rank.reads) {
      const what = isMla ? "latent" : `heads ${showHeads(read.heads)}`;
      lines.push(
        `  P${read.prefillRank} -- "${what}, ${showBytes(read.lengthBytes)}" --> D${rank.decodeRank}`,
      );
    }
    for (const prefillRank of rank.notifyOnly)
      lines.push(`  D${rank.decodeRank} -. notifies .-> P${prefillRank}`);
  }
  return `${lines.join("\n")}\n`;
}

function escapeMermaid(text: string): string {
  return text
    .replaceAll("&", "#amp;")
    .replaceAll('"', "#quot;")
    .replaceAll("<", "#lt;")
    .replaceAll("\n", " ");
}
