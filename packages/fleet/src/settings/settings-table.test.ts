import { expect, test } from "vitest";
import { z } from "zod";
import { count, counted, group, ms, setting, settingsIn } from "./settings-table.js";

const schema = z.strictObject({
  ...group("Limits", {
    limits: setting(
      z
        .strictObject({
          connections: setting(
            count.optional(),
          )`--max <n>: connections: of clients (default: half of
            ${10})`,
          bodyBytes: counted(2 ** 20)`a body`,
        })
        .prefault({}),
    )`what is held`,
  }),
  stallMs: ms(1_500)`--stall-ms <ms>: a wait`,
  mode: setting(z.enum(["a", "b"]).default("a"))`the mode`,
  routes: setting(
    z.strictObject({ token: setting(z.string().optional())`a token` }).optional(),
  )`--routes: more`,
});

test("a setting has its place, its flag, its default with a unit, and the heading of its group", () => {
  const found = settingsIn(schema).map(({ path, flag, description, usual, heading, choices }) => [
    path.join("."),
    flag,
    description,
    usual,
    heading,
    choices,
  ]);
  expect(found).toEqual([
    [
      "limits.connections",
      "--max <n>",
      "connections: of clients",
      "half of 10",
      "Limits",
      undefined,
    ],
    ["limits.bodyBytes", undefined, "a body", "1 MiB", "Limits", undefined],
    ["stallMs", "--stall-ms <ms>", "a wait", "1.5 s", undefined, undefined],
    ["mode", undefined, "the mode", "a", undefined, ["a", "b"]],
    ["routes", "--routes", "more", undefined, undefined, undefined],
    ["routes.token", undefined, "a token", undefined, undefined, undefined],
  ]);
});
