import { checksText, doctorSchemas } from "@kv/program";
import type { z } from "zod";

/** Which server of a pair: P computes the prompt, D receives its KV. */
export type Role = "prefill" | "decode";

const schemas = doctorSchemas(
  ["prefill", "decode", "versions", "compatibility", "plan", "clocks", "bytes"],
  "prefill.side-channel",
);

/**
 * One line of a report: a stable id, an area, a status, what was found, and what to do about it.
 */
export type Check = z.infer<typeof schemas.check>;

/** The JSON that `kv-peer doctor --json` prints. */
export const pairReportSchema = schemas.report;

/** The report of `pairDoctor`: all checks, their counts, and the worst status as the verdict. */
export type PairReport = z.infer<typeof pairReportSchema>;

/** A check of one server, without its id and area. */
export type ServerCheck = Omit<Check, "id" | "area">;

/** Collects the checks of one server; their ids begin with its role. */
export class ServerChecks {
  readonly all: Check[] = [];
  readonly #role: Role;

  constructor(role: Role) {
    this.#role = role;
  }

  add(id: string, check: ServerCheck): void {
    this.all.push({ id: `${this.#role}.${id}`, area: this.#role, ...check });
  }
}

/** The report as text: one line per check, its fix below it, and the verdict in the last line. */
export function reportText(report: PairReport): string {
  const { checks, counts } = report;
  return checksText(report, {
    ok: "this pair can work",
    warn: `this pair can work; ${counts.warn} of ${checks.length} checks are warnings`,
    fail: `this pair cannot work: ${counts.fail} of ${checks.length} checks failed`,
  });
}
