# Rscript lmer.R data.csv formula gaussian|binomial: seconds and log-likelihood of lme4's fit as JSON; the reading is not timed.
suppressMessages(library(lme4))
given <- commandArgs(TRUE)
rows <- read.csv(given[1], stringsAsFactors = FALSE)
for (name in c("client", "cluster")) rows[[name]] <- factor(rows[[name]])
model <- as.formula(given[2])
spent <- system.time(suppressWarnings(
  fit <- if (given[3] == "gaussian") lmer(model, rows) else glmer(model, rows, family = given[3])
))
cat(sprintf('{"seconds": %.3f, "log_likelihood": %.6f}\n', spent[["elapsed"]], as.numeric(logLik(fit))))
