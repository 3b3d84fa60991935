import type { PlanReport } from "../report/report.js";

/**
 * The bytes of the sample request as a traffic matrix of NIXL's kvbench (`ct-perftest`): a line for
 * each sending rank, a column for each receiving one, numbers of bytes. Prefill ranks come first,
 * stage after stage, then decode ranks.
 */
export function renderKvbench({ notifications, ranks }: PlanReport): string {
  const size = notifications.length + ranks.length;
  const senders = notifications.map(({ prefillRank, prefillStage }) => {
    const bytes = ranks.map(({ reads }) =>
      reads
        .filter((read) => read.prefillRank === prefillRank && read.prefillStage === prefillStage)
        .reduce((sum, read) => sum + read.lengthBytes, 0),
    );
    return [...notifications.map(() => 0), ...bytes];
  });
  const receivers = ranks.map(() => Array.from({ length: size }, () => 0));
  return [...senders, ...receivers].map((row) => `${row.join(" ")}\n`).join("");
}
