import { Command } from "commander";
import { expect, test } from "vitest";
import { addCommand, type CommandTable } from "./option-table.js";

const TABLE: CommandTable = {
  shared: { where: [{ flags: "--host <host>", description: "of it", default: "::1" }] },
  commands: {
    move: {
      description: "move it",
      options: [
        "Places:",
        "where",
        { flags: "--to <name>", description: "the place", isRequired: true, value: "upper" },
        "Limits:",
        { flags: "--time <time>", description: "at most", value: "duration", default: "2s" },
        { flags: "--sizes <list>", description: "of them", value: "size", many: "list" },
        { flags: "--peer <text>", description: "another", value: "text", many: "each" },
        { flags: "--order <name>", description: "of all", choices: ["up", "down"], anyCase: true },
        { flags: "--rank <n>", description: "of it", range: [0, 7], default: 3 },
      ],
    },
  },
};

function run(line: string) {
  const program = new Command().exitOverride().configureOutput({ writeErr: () => {} });
  const command = addCommand(program, "move", TABLE, { upper: (text) => text.toUpperCase() });
  const help = command.helpInformation();
  program.parse(["move", ...line.split(" ")], { from: "user" });
  return { help, values: command.opts() };
}

test("values are read by name, as lists, several times, by choice and by range", () => {
  const line = "--to here --sizes 1KiB,2 --peer a --peer b --order UP --rank 7 --time 1m";
  expect(run(line).values).toEqual({
    host: "::1",
    to: "HERE",
    time: 60_000,
    sizes: [1024, 2],
    peer: ["a", "b"],
    order: "up",
    rank: 7,
  });
});

test("defaults that are text are read; the help shows them and the headings", () => {
  const { help, values } = run("--to x");
  expect(values).toEqual({ host: "::1", to: "X", time: 2000, rank: 3 });
  expect(help).toMatch(
    /Places:\n +--host.*"::1".*\n +--to[\s\S]*Limits:\n +--time.*\(default: 2s\)/,
  );
});

test.each([
  ["--sizes 1", /required option '--to <name>'/],
  ["--to x --order left", /It must be one of up, down/],
  ["--to x --rank 8", /a whole number from 0 to 7/],
])("refuses %s", (line, message) => {
  expect(() => run(line)).toThrow(message);
});
