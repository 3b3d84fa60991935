import { readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { AXES, type Case, pairwise, truthful } from "./cases.js";
import { runCases } from "./run-case.js";

test("however a request ends, its client has the truth, nothing is held, and nobody else is blamed", async () => {
  expect(await runCases(pairwise())).toEqual([]);
});

test("docs/operate/failing-instances.md has each fault, and what the client gets", () => {
  const page = new URL("../../../../docs/operate/failing-instances.md", import.meta.url);
  const [, table = ""] = readFileSync(page, "utf8").split("| answer | of P | of D |");
  const rows = Array.from(table.matchAll(/^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|/gm), (row) =>
    row.slice(1, 4).map((cell) => cell.replace("a web page", "HTML")),
  ).slice(0, AXES.fault.length + 1);
  const got = (fault: Case["fault"], leg: "P" | "D") => {
    const one = { strategy: "pull", stream: false, n: 1, client: "stays", others: 0 } as const;
    return [...truthful({ ...one, fault, leg, frontEnd: "proxy" })].join(" or ");
  };
  expect(rows.slice(1)).toEqual(
    AXES.fault.map((fault) => [fault, got(fault, "P"), got(fault, "D")]),
  );
});
