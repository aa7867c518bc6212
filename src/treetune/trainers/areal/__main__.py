from treetune.trainers.areal.run import main

main()
