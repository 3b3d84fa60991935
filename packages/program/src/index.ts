export { type ChildOptions, ChildProcess } from "./child-process.js";
export { answerOf, endWithOwner, receiveRequest, runTask, sendToOwner } from "./child-task.js";
export { checksText, printDoctorReport, reportOfChecks, warningsText } from "./doctor-report.js";
export {
  count,
  duration,
  each,
  type HostAndPort,
  hostAndPort,
  httpUrl,
  listenAddress,
  listOf,
  number,
  oneOf,
  port,
  positiveNumber,
  refuseValue,
  share,
  size,
  wholeNumber,
  wholeNumberFrom,
} from "./flag-values.js";
export {
  addCommand,
  addOptions,
  type CommandTable,
  type OptionRow,
  type TableRow,
  type ValueReader,
} from "./option-table.js";
export { print, printable, printError, printJson } from "./print.js";
export { showProgress } from "./progress.js";
export { type CommandOptions, runCommand } from "./run-command.js";
export { type ChildFailure, type ChildOutcome, failureText, runInChild } from "./run-in-child.js";
export {
  commanderOutput,
  EXIT_CODES,
  onInterrupt,
  packageVersion,
  reportFailure,
  runProgram,
} from "./run-program.js";
