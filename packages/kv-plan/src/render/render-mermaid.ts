import type { PairReport } from "../report/report.js";
import { holdsLatents, showBytes, showCaches, showHeads, showPrefillRank } from "./format.js";

/**
 * The pair as a Mermaid flow chart: solid arrows for reads, dotted ones for notifications without a
 * read.
 */
export function renderMermaid(report: PairReport): string {
  if (report.outcome === "refused") {
    return ["graph LR", `  refused["refused: ${escapeMermaid(report.reason)}"]`, ""].join("\n");
  }
  const isMla = holdsLatents(report.groups);
  const lines = ["graph LR"];
  const stages = report.stages.length;
  const { tpSize, ppSize } = report.prefill;
  lines.push(`  subgraph prefill["prefill, TP ${tpSize}${ppSize === 1 ? "" : `, PP ${ppSize}`}"]`);
  for (const { stage, regions } of report.stages) {
    if (stages > 1)
      lines.push(
        `    subgraph stage${stage}["stage ${stage}: ${escapeMermaid(showCaches(regions))}"]`,
      );
    for (const notice of report.notifications) {
      if (notice.prefillStage !== stage) continue;
      const name = showPrefillRank(notice, stages);
      lines.push(`    ${name}["${name}, awaits ${notice.awaits}"]`);
    }
    if (stages > 1) lines.push("    end");
  }
  lines.push("  end", `  subgraph decode["decode, TP ${report.decode.tpSize}"]`);
  for (const { decodeRank, heads } of report.ranks)
    lines.push(`    D${decodeRank}["D${decodeRank}${isMla ? "" : `, heads ${showHeads(heads)}`}"]`);
  lines.push("  end");
  for (const rank of report.ranks) {
    for (const read of rank.reads) {
      const what = isMla ? "latent" : `heads ${showHeads(read.heads)}`;
      lines.push(
        `  ${showPrefillRank(read, stages)} -- "${what}, ${showBytes(read.lengthBytes)}" --> D${rank.decodeRank}`,
      );
    }
    for (const rankOnly of rank.notifyOnly)
      lines.push(`  D${rank.decodeRank} -. notifies .-> ${showPrefillRank(rankOnly, stages)}`);
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
