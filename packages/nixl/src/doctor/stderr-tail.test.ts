import { expect, test } from "vitest";
import { withWords } from "./stderr-tail.js";

const words = (output: string) => withWords("found", { output });

test("the reason that UCX gives stands before the errors that follow from it", () => {
  const said = [
    "[1795342071.646355] [vm:8334 :0]     ucp_context.c:1508 UCX  WARN  transport 'foo' is not available, please use one or more of: cma, tcp",
    "[1795342071.646759] [vm:8334 :0]     ucp_context.c:1770 UCX  ERROR no usable transports/devices",
    "E1122 10:07:51.647353    8345 backend_plugin.h:102] Failed to create engine",
    "E1122 10:07:51.647869    8345 nixl_agent.cpp:342] createBackend: backend creation failed for 'UCX'",
  ];
  expect(words(`${said.join("\n")}\n`)).toBe(`found\nit said:\n${said.join("\n")}`);
});

test("what is said when all is well, and the tables of protocols, are left out", () => {
  const quiet = [
    "[1.5] [vm:1 :0] ucp.c:1 UCX  INFO  cfg",
    "| a | b |",
    "[1.5] [vm:1:0] +---+----+",
    "I1122 10:07:51.6 1 nixl.cpp:1] up",
    " ",
  ];
  expect(words(quiet.join("\n"))).toBe("found");
  expect(words([...quiet, "last"].join("\n"))).toBe("found\nit said:\nlast");
});

test("no more than some lines of some length, and nothing that moves a terminal's cursor", () => {
  const many = Array.from({ length: 100 }, (_, index) => `line ${index}`).join("\n");
  expect(words(many)).toBe("found\nit said:\nline 94\nline 95\nline 96\nline 97\nline 98\nline 99");
  expect(words("x".repeat(5000))).toBe(`found\nit said:\n${"x".repeat(300)}…`);
  expect(words("\u001b[32mgreen\u0007\u202e\u001b[0m\r\nnext\u0000")).toBe("found\nit said:\ngreen\nnext");
});
