import { expect, test } from "vitest";
import { readUcxLanes } from "./ucx-lanes.js";

const table = (title: string, ...rows: string[]) =>
  [
    "[1.0] [host:1:0] +------------+------------------+",
    `[1.0] [host:1:0] | ${title} |`,
    "[1.0] [host:1:0] +------------+----------+-------+",
    ...rows.map((row) => `[1.0] [host:1:0] ${row}`),
    "[1.0] [host:1:0] +------------+----------+-------+",
  ].join("\n");

test("only the last table of remote reads is used", () => {
  const log = [
    table(
      "self cfg#0 remote memory read by ucp_get*(multi)",
      "| 0..inf | software emulation | self/memory |",
    ),
    table(
      "inter cfg#1 remote memory read by ucp_get*(multi)",
      "| 0..511 | short | tcp/lo |",
      "| 512..inf | zero-copy | cma/memory |",
    ),
    table("inter cfg#1 remote memory write by ucp_put*", "| 0..inf | zero-copy | tcp/eth0 |"),
    "something | else | 3",
  ].join("\n");
  expect(readUcxLanes(log)).toEqual([
    { range: "0..511", how: "short tcp/lo" },
    { range: "512..inf", how: "zero-copy cma/memory" },
  ]);
});

test("output without a table gives no lanes", () => {
  expect(readUcxLanes("ucx is quiet\n|a|b|\n")).toEqual([]);
});
