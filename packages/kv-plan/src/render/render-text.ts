import type { EngineReport, PairReport, PlanReport, RefusalReport } from "../report/report.js";
import {
  counted,
  holdsLatents,
  showBytes,
  showCaches,
  showHeads,
  showPrefillRank,
} from "./format.js";
import { postingLines } from "./posting-lines.js";

/** The report for a terminal, without colour. */
export function renderText(report: PairReport): string {
  return `${(report.outcome === "planned" ? planned(report) : refused(report)).join("\n")}\n`;
}

function planned(report: PlanReport): string[] {
  const { request } = report;
  const stages = report.stages.length;
  const isMla = holdsLatents(report.groups);
  const heads = (range: readonly [number, number]) => (isMla ? "latent" : showHeads(range));
  const rows = report.ranks.flatMap((rank) => {
    if (rank.reads.length === 0)
      return [[`D${rank.decodeRank}`, heads(rank.heads), "-", "-", "-", "-", "-", "-"]];
    return rank.reads.map((read) => [
      `D${rank.decodeRank}`,
      heads(rank.heads),
      showPrefillRank(read, stages),
      heads(read.heads),
      `${read.layers}`,
      showBytes(read.lengthBytes),
      `${read.descriptors}`,
      `${read.merged}`,
    ]);
  });
  const notices = report.notifications.map((notice) => [
    showPrefillRank(notice, stages),
    `${notice.awaits}`,
    notice.from.length === 0 ? "-" : notice.from.map((rank) => `D${rank}`).join(", "),
  ]);
  const [rank] = report.ranks;
  const pass = [
    rank !== undefined && rank.permutedBlocks > 0
      ? `${counted(rank.permutedBlocks, "block")} put in order`
      : undefined,
    rank !== undefined && rank.zeroedBlocks > 0
      ? `${counted(rank.zeroedBlocks, "block")} with a tail zeroed`
      : undefined,
  ].filter((part) => part !== undefined);
  return [
    report.title,
    ...(report.plannedFrom === null ? [] : [`planned from: ${report.plannedFrom}`]),
    "",
    ...engines(report),
    "",
    `form       ${report.form}${report.blockSizeRatio !== 1 ? `, ${report.blockSizeRatio} prefill blocks in a decode block` : ""}`,
    `           ${report.formReason}`,
    ...report.conversions.map((conversion) => `conversion ${conversion}, by the engine`),
    `tail       ${report.uncovered}`,
    "",
    `A request of ${request.numTokens} tokens, ${counted(request.computedBlocks, "block")} of them a prefix hit, ${request.pool} pools:`,
    `  ${showBytes(request.lengthBytes)} in ${counted(request.descriptors, "descriptor")}, ${request.merged} after merging; ` +
      `${Number(request.transferMs.toPrecision(3))} ms for the largest rank at ${request.bandwidthGBps} GB/s`,
    `  receive pass per rank and region: ${pass.length === 0 ? "none" : pass.join(", ")}`,
    ...kindLines(report),
    ...postingLines(report.posting).map((line) => `  ${line}`),
    "",
    ...table(
      ["rank", "its heads", "reads", "the heads", "regions", "bytes", "descriptors", "merged"],
      rows,
    ),
    "",
    ...stageLines(report),
    ...table(["prefill rank", "awaits", "notified by"], notices),
    "",
    ...proofLines(report),
    ...report.tiers.flatMap((page) => [`tiers      ${page}`, ""]),
    ...report.refusedByVllm.flatMap((reason) => [`not for a vLLM decode worker: ${reason}`, ""]),
    ...assumptions(report.assumed),
  ];
}

function refused(report: RefusalReport): string[] {
  return [
    report.title,
    "",
    `refused: ${report.reason} [${report.code}]`,
    ...(report.hint === null ? [] : [`  ${report.hint}`]),
    "",
    ...(report.wouldWork.length === 0
      ? ["No single change that was tried makes the pair work."]
      : [
          "Each of these alone makes the pair work:",
          ...report.wouldWork.map((change) => `  ${change}`),
        ]),
    "",
    ...assumptions(report.assumed),
  ];
}

function engines({ prefill, decode, groups, numKvHeads }: PlanReport): string[] {
  const line = (engine: EngineReport) => [
    engine.ppSize === 1 ? `TP ${engine.tpSize}` : `TP ${engine.tpSize}, PP ${engine.ppSize}`,
    engine.blockSize === engine.kernelBlockSize
      ? `${engine.blockSize} tokens`
      : `${engine.blockSize} tokens (kernel ${engine.kernelBlockSize})`,
    engine.layout,
    engine.attentionBackend,
    `${engine.regions}`,
    `${engine.numBlocks}`,
    showBytes(engine.bytesPerRank),
  ];
  return [
    ...table(
      ["engine", "ranks", "block", "layout", "backend", "regions", "blocks", "per rank"],
      [
        ["prefill", ...line(prefill)],
        ["decode", ...line(decode)],
      ],
    ),
    ...groupLines(groups, prefill, decode),
    ...(holdsLatents(groups) ? [] : [`heads      ${counted(numKvHeads, "KV head")} of the model`]),
  ];
}

/** "swa, full", with each group's block tokens where they differ. */
function groupLines(
  groups: readonly string[],
  prefill: EngineReport,
  decode: EngineReport,
): string[] {
  const tokens = (engine: EngineReport, group: number) =>
    engine.groupBlockTokens?.[group] ?? engine.blockSize;
  const differ = prefill.groupBlockTokens !== null || decode.groupBlockTokens !== null;
  const named = groups.map((kind, group) => {
    const [one, other] = [tokens(prefill, group), tokens(decode, group)];
    return differ
      ? `${kind} (${one === other ? one : `${one} and ${other}`} tokens a block)`
      : kind;
  });
  return [`groups     ${named.join(", ")}`];
}

function kindLines({ kinds }: PlanReport): string[] {
  if (kinds.length < 2) return [];
  const shown = kinds.map(
    ({ name, layers, requestBytes }) =>
      `${showBytes(requestBytes)} ${name} (${counted(layers, "layer")})`,
  );
  return [`  on a decode rank: ${shown.join(", ")}`];
}

function stageLines({ stages }: PlanReport): string[] {
  if (stages.length === 1) return [];
  const rows = stages.map(({ stage, regions, read, readers }) => [
    `${stage}`,
    `${regions.length}`,
    showCaches(regions),
    read
      .map((rank) => showPrefillRank({ prefillRank: rank, prefillStage: stage }, stages.length))
      .join(", "),
    readers.map((rank) => `D${rank}`).join(", "),
  ]);
  return [...table(["stage", "regions", "of", "read from", "by"], rows), ""];
}

function proofLines({ proof }: PlanReport): string[] {
  if (!proof.proven) {
    const at = Object.entries(proof.fault.at).map(([key, value]) => `${key} ${value}`);
    return [`NOT PROVEN: ${proof.fault.kind}: ${proof.fault.message}`, `  at ${at.join(", ")}`, ""];
  }
  const { requests, blocks, patterns, descriptors } = proof.extent;
  return [
    `proven     ${counted(blocks, "block")} of ${counted(requests, "request")} (${counted(patterns, "pattern")}), ${counted(descriptors, "descriptor")} of the tables:`,
    ...proof.statements.map((statement) => `  ${statement}`),
    ...proof.assumed.map((assumption) => `  provided that ${assumption}`),
    "",
  ];
}

function assumptions(assumed: readonly string[]): string[] {
  return assumed.length === 0 ? [] : ["assumed:", ...assumed.map((line) => `  ${line}`)];
}

function table(head: readonly string[], rows: readonly (readonly string[])[]): string[] {
  const widths = head.map((title, column) =>
    Math.max(title.length, ...rows.map((row) => row[column]?.length ?? 0)),
  );
  return [head, ...rows].map((row) =>
    row
      .map((cell, column) => cell.padEnd(widths[column] ?? 0))
      .join("  ")
      .trimEnd(),
  );
}
