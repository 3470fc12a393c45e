# Rscript fit.R lme4|glmmTMB rows.csv formula gaussian|binomial: the best seconds of up to three fits and the log-likelihood,
# as JSON; reading the file is not timed.
given <- commandArgs(TRUE)
suppressMessages(library(given[1], character.only = TRUE))
rows <- read.csv(given[2], stringsAsFactors = TRUE)
model <- as.formula(given[3])
fit <- function() suppressMessages(suppressWarnings(
  if (given[1] == "glmmTMB") {
    glmmTMB(model, rows, family = given[4], REML = given[4] == "gaussian", control = glmmTMBControl(parallel = 2))
  } else if (given[4] == "gaussian") lmer(model, rows) else glmer(model, rows, family = given[4])
))
spent <- c()
while (length(spent) < 3 && (length(spent) == 0 || spent[1] < 20)) {
  spent <- c(spent, system.time(fitted <- fit())[["elapsed"]])
}
cat(sprintf('{"seconds": %.3f, "log_likelihood": %.6f, "version": "%s"}\n',
            min(spent), as.numeric(logLik(fitted)), packageVersion(given[1])))
