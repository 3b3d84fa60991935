import { readFileSync, writeFileSync } from "node:fs";

const file = new URL("fixtures/connector-checks.tsv", import.meta.url);

export interface ConnectorCheck {
  readonly releases: readonly string[];
  /** Rows of the table of refusals, or why it is none; "?" until somebody has looked. */
  readonly is: readonly string[];
  readonly check: string;
}

export function connectorChecks(): readonly ConnectorCheck[] {
  const lines = readFileSync(file, "utf8").trimEnd().split("\n");
  return lines.map((line) => {
    const [releases = "", is = "", check = ""] = line.split("\t");
    return { releases: releases.split(" "), is: is.split(" "), check };
  });
}

/** New checks are "?". */
export function writeChecks(release: string, checks: readonly string[]): void {
  const table = new Map(connectorChecks().map((line) => [line.check, line]));
  for (const check of new Set([...table.keys(), ...checks])) {
    const { releases = [], is = ["?"] } = table.get(check) ?? {};
    const others = releases.filter((each) => each !== release);
    table.set(check, {
      releases: checks.includes(check) ? [...others, release].sort() : others,
      is,
      check,
    });
  }
  const kept = [...table.values()].filter(({ releases }) => releases.length > 0);
  const lines = kept.map(
    ({ releases, is, check }) => `${releases.join(" ")}\t${is.join(" ")}\t${check}\n`,
  );
  writeFileSync(
    file,
    lines
      .sort((a, b) => (a.split("\t")[2] ?? "").localeCompare(b.split("\t")[2] ?? "", "en"))
      .join(""),
  );
}
